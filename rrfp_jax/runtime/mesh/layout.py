"""Where the stages of a mesh are: which process has which, on which devices, and who sends to whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import jax

from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, VirtualStage, WidthChanges
from rrfp_jax.runtime.run.world import World

Item = TypeVar("Item")


def stage_replica_name(stage_replica: int, stages: int) -> str:
    """A stage replica (see `Layout`) as messages name it; the first replica's as if there were no other."""
    replica, stage = divmod(stage_replica, stages)
    return f"stage {stage} of replica {replica}" if replica else f"stage {stage}"


def taking_turns(devices: Mapping[int, Sequence[jax.Device]]) -> dict[int, jax.Device]:
    """By stage the device that stands for its own and those of all stages that share any of them."""
    first: dict[int, jax.Device] = {}
    for stage, own in devices.items():
        first[stage] = own[0]
        met = {first[other] for other in first if not set(devices[other]).isdisjoint(own)}
        first |= {other: own[0] for other, device in first.items() if device in met}
    return first


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the stages of a mesh are.

    A *stage replica* is a stage of one replica of the model, number `replica * stages + stage`; without data
    parallelism, stage replicas are stages. What the runtime numbers by stage is numbered by stage replica.

    Attributes:
        world: the processes.
        widths: by stage, how many devices share its tensors.
        groups: by stage replica, the ranks of its processes in the order of their devices.
        stage_meshes: of this process's stage replicas, by stage replica.
        homes: of this process's stages, by stage, the devices of all their replicas; empty without replicas.
        shard_optimizer: whether replicas share the optimizer's state.
    """

    world: World
    widths: Sequence[int]
    groups: Sequence[Sequence[int]]
    stage_meshes: Mapping[int, StageMesh]
    homes: Mapping[int, StageMesh] = field(default_factory=dict)
    shard_optimizer: bool = False

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.widths)

    @property
    def replicas(self) -> int:
        """How many there are of every stage."""
        return len(self.groups) // self.stages

    @property
    def devices(self) -> Mapping[int, Sequence[jax.Device]]:
        """By stage replica of this process, its devices here."""
        return {number: stage_mesh.own for number, stage_mesh in self.stage_meshes.items()}

    @property
    def group(self) -> Sequence[int]:
        """The ranks that share this process's stage replicas, its own among them."""
        return self.groups[next(iter(self.stage_meshes))]

    @property
    def grouped(self) -> bool:
        """Whether several processes share a stage."""
        return any(len(ranks) > 1 for ranks in self.groups)

    @property
    def member(self) -> int:
        """This process's place in its group."""
        return self.group.index(self.world.rank)

    @property
    def reported(self) -> Collection[int]:
        """The stage replicas of which this process tells the others what all of their group know."""
        return self.stage_meshes.keys() if self.member == 0 else ()

    @property
    def receivers(self) -> Sequence[Sequence[int]]:
        """By stage replica, the ranks to which this process sends what is for it.

        Each rank of a stage replica gets it from one rank of the sending one: from its like if there are
        equally many, else either some send to several, or some to none.
        """
        mine, own = self.member, len(self.group)
        return [[r for i, r in enumerate(group) if i * own // len(group) == mine] for group in self.groups]

    def virtual_stages(
        self, placement: Placement, chunks: Sequence[Sequence[range]]
    ) -> list[list[VirtualStage]]:
        """By stage, of all processes, the virtual stages with the layers of each chunk."""
        widths = [self.widths[placement.place(v)[0]] for v in range(placement.last + 1)]

        def virtual_stage(stage: int, chunk: int) -> VirtualStage:
            v = placement.virtual_stage(stage, chunk)
            before, after = widths[max(v - 1, 0)], widths[min(v + 1, placement.last)]
            return VirtualStage(
                chunks[stage][chunk], widths[v], WidthChanges(before != widths[v], after != widths[v])
            )

        return [
            [virtual_stage(stage, chunk) for chunk in range(len(own))] for stage, own in enumerate(chunks)
        ]

    def place(self, stage_replica: int) -> tuple[int, int]:
        """Replica and stage."""
        return divmod(stage_replica, self.stages)

    def replicas_of(self, stage: int) -> list[int]:
        """This process's stage replicas of a stage."""
        return [number for number in self.stage_meshes if self.place(number)[1] == stage]

    def stages_of(self, replica: int) -> list[int]:
        """This process's stage replicas of a replica of the model."""
        return [number for number in self.stage_meshes if self.place(number)[0] == replica]

    def name(self, stage_replica: int) -> str:
        """A stage replica as messages name it."""
        return stage_replica_name(stage_replica, self.stages)

    def share(self, stage_replica: int, microbatches: Sequence[Item]) -> Sequence[Item]:
        """Of what there is one of per microbatch of a step, what a stage replica gets."""
        replica, _ = self.place(stage_replica)
        return microbatches[replica :: self.replicas]

    def count_of(self, microbatches: int) -> int:
        """How many of a step's microbatches each replica gets.

        Raises:
            UsageError: replicas cannot share them evenly.
        """
        if microbatches % self.replicas:
            raise UsageError(
                f"a step of {microbatches} microbatches for dp={self.replicas} replicas: each takes equally "
                f"many, so give a multiple of {self.replicas}"
            )
        return microbatches // self.replicas
