"""The data of a step's microbatches, on the devices whose programs read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.buckets import Bucket
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.library import StagePrograms
from rrfp_jax.runtime.sizes import as_sent

Load: TypeAlias = Callable[[Sequence[frozenset[str]]], Sequence[Mapping[str, Any]]]
"""The fields wanted of each microbatch -> their arrays by name."""


class Inputs:
    """Loads what the stage replicas of this process read.

    Args:
        layout: where they are.
        seed: of the run, which random keys depend on.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout, self._seed = layout, seed

    def reads(self, bucket: Bucket, microbatch: int, programs: StagePrograms) -> frozenset[str]:
        """The names of the fields of a microbatch that any program here reads; none of another replica's."""
        used: set[int] = set()
        for stage_replica in self._stage_replicas(microbatch):
            used.update(*(virtual_stage.inputs for virtual_stage in programs[stage_replica]))
        return frozenset(name for i, (name, _, _) in enumerate(bucket) if i in used)

    def load(
        self, step: int, buckets: Sequence[Bucket], programs: Sequence[StagePrograms], load: Load
    ) -> dict[int, list[list[jax.Array | None]]]:
        """Per stage replica and microbatch of its replica, the inputs that its programs read: fields, then
        numbers.

        Args:
            step: its number.
            buckets, programs: of each microbatch.
            load: asked once, for all microbatches.
        """
        host: dict[int, list[list[Any]]] = {stage_replica: [] for stage_replica in self._layout.stage_meshes}
        wanted = [self.reads(bucket, j, programs[j]) for j, bucket in enumerate(buckets)]
        for j, arrays in enumerate(load(wanted)):
            names = [name for name, _, _ in buckets[j]]
            given = {name: as_sent(array) for name, array in arrays.items()}
            values = [*(given.get(name) for name in names), np.array([self._seed, step, j], IDS.dtype)]
            for stage_replica in self._stage_replicas(j):
                used = frozenset().union(
                    *(virtual_stage.inputs for virtual_stage in programs[j][stage_replica])
                )
                host[stage_replica].append([value if i in used else None for i, value in enumerate(values)])
        return {
            stage_replica: self._layout.stage_meshes[stage_replica].put(values)
            for stage_replica, values in host.items()
        }

    def _stage_replicas(self, microbatch: int) -> list[int]:
        """Those of this process that see a microbatch."""
        replica = microbatch % self._layout.replicas
        return [
            stage_replica
            for stage_replica in self._layout.stage_meshes
            if stage_replica // self._layout.stages == replica
        ]
