"""What every stage needs of its device, known from the compiled programs before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from rrfp_jax.core.buckets import Bucket, bucket_name
from rrfp_jax.core.memory.footprint import Chunks, Footprint
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.library import specs_of
from rrfp_jax.runtime.programs.programs import VirtualStagePrograms
from rrfp_jax.runtime.sizes import memory_limit, nbytes
from rrfp_jax.runtime.stages.stage import Stage


def parked_bytes(unadded_gradients: int, gradient_bytes: Sequence[int]) -> int:
    """What gradients that are not added yet take at most.

    Args:
        unadded_gradients: how many a stage may have, whichever of its chunks they are of; see `StepRules`.
        gradient_bytes: of one microbatch's gradient of each chunk, which is as wide as its sum.
    """
    return unadded_gradients * max(gradient_bytes)


@dataclass(frozen=True, kw_only=True)
class BucketLedger:
    """What one shape bucket needs on a stage.

    Attributes:
        data_bytes: fields of a microbatch that are read here; loaded for the whole step when it begins.
        prepared_bytes: what is computed from parameters once a step.
        chunks: what each microbatch takes on each chunk.
    """

    data_bytes: int
    prepared_bytes: int
    chunks: Chunks

    @property
    def held_bytes(self) -> int:
        """Between forward and backward, per microbatch."""
        return sum(chunk.held_after_forward_bytes for chunk in self.chunks)

    @property
    def transient_bytes(self) -> int:
        """Of the program that needs most while it runs."""
        return max(chunk.most_transient_bytes for chunk in self.chunks)

    @classmethod
    def of(cls, bucket: Bucket, virtual_stages: Sequence[VirtualStagePrograms]) -> BucketLedger:
        """From the programs of each chunk."""
        inputs = [*specs_of(bucket).values(), IDS]
        read = frozenset().union(*(virtual_stage.inputs for virtual_stage in virtual_stages))
        return cls(
            data_bytes=nbytes([inputs[i] for i in read]),
            prepared_bytes=sum(virtual_stage.prepared_bytes for virtual_stage in virtual_stages),
            chunks=[virtual_stage.footprint for virtual_stage in virtual_stages],
        )


@dataclass(frozen=True, kw_only=True)
class StageLedger:
    """What a stage needs of its device.

    Attributes:
        device, rank: its name, and the process that it belongs to.
        layers: first and one after the last, of each chunk.
        parameters: their number.
        parked_gradient_bytes: gradients that wait for their turn to be added.
        slot_bytes: registered for messages from other processes (`runtime/transport/nixl`).
        device_limit_bytes: what the device can hold; None if it does not say.
        buckets: by shapes, of those compiled for training.
    """

    device: str
    rank: int
    layers: Sequence[tuple[int, int]]
    parameters: int
    weight_bytes: int
    optimizer_bytes: int
    accumulator_bytes: int
    parked_gradient_bytes: int
    slot_bytes: int
    device_limit_bytes: int | None
    compile_seconds: float
    buckets: Mapping[str, BucketLedger]

    @property
    def fixed_bytes(self) -> int:
        """Needed whatever the microbatches are."""
        lasting = self.weight_bytes + self.optimizer_bytes + self.accumulator_bytes + self.slot_bytes
        return lasting + self.parked_gradient_bytes

    @property
    def largest(self) -> BucketLedger:
        """The bucket of which a microbatch holds most."""
        return max(self.buckets.values(), key=lambda bucket: bucket.held_bytes)

    def plain(self) -> dict[str, Any]:
        """As plain data, for JSON and messages."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> StageLedger:
        """What `plain` gave."""
        buckets = {
            name: BucketLedger(**bucket | {"chunks": [Footprint(**chunk) for chunk in bucket["chunks"]]})
            for name, bucket in plain["buckets"].items()
        }
        layers = [(first, end) for first, end in plain["layers"]]
        return cls(**dict(plain) | {"layers": layers, "buckets": buckets})

    @classmethod
    def of(
        cls,
        stage: Stage,
        optimizer_bytes: int,
        device: jax.Device,
        rank: int,
        programs: Mapping[Bucket, Sequence[VirtualStagePrograms]],
        unadded_gradients: int,
        slot_bytes: int,
        compile_seconds: float,
    ) -> StageLedger:
        """From what a stage has and runs.

        Args:
            stage: with its parameters.
            optimizer_bytes: of its optimizer's state.
            device: that stands for its devices, see `taking_turns`.
            rank: of this process.
            programs: by bucket, of each chunk.
            unadded_gradients: how many there may be; see `StepRules`.
            slot_bytes: of its transport.
            compile_seconds: spent on it.
        """
        leaves = jax.tree.leaves(stage.leaves)
        return cls(
            device=str(device),
            rank=rank,
            layers=[(layers.start, layers.stop) for layers in stage.chunks],
            parameters=sum(leaf.size for leaf in leaves),
            weight_bytes=nbytes(leaves),
            optimizer_bytes=optimizer_bytes,
            accumulator_bytes=nbytes(stage.gradients),
            parked_gradient_bytes=parked_bytes(unadded_gradients, stage.gradient_bytes),
            slot_bytes=slot_bytes,
            device_limit_bytes=memory_limit(stage.stage_mesh.device),
            compile_seconds=compile_seconds,
            buckets={
                bucket_name(bucket): BucketLedger.of(bucket, virtual_stages)
                for bucket, virtual_stages in programs.items()
            },
        )
