"""Where the stages of a mesh are: which process has which, on which devices, and who sends to whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.group.agreement import Agreement, Terms
from rrfp_jax.runtime.processes.world import World
from rrfp_jax.runtime.programs.stage_mesh import Ends, Piece, Site
from rrfp_jax.runtime.transport.protocol import Devices, LocalTransport, Transport
from rrfp_jax.runtime.transport.routed import RoutedTransport
from rrfp_jax.runtime.transport.socket import SocketTransport

Item = TypeVar("Item")


def seat_name(seat: int, stages: int) -> str:
    """A seat (see `Layout`) as messages name it; the first replica's as if there were no other."""
    replica, stage = divmod(seat, stages)
    return f"stage {stage} of replica {replica}" if replica else f"stage {stage}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the stages of a mesh are.

    A *seat* is a stage of one replica of the model, number `replica * stages + stage`; without data
    parallelism, seats are stages. What the runtime numbers by stage is numbered by seat.

    Attributes:
        world: the processes.
        widths: by stage, how many devices share its tensors.
        groups: by seat, the ranks of its processes in the order of their devices.
        sites: of this process's seats, by seat.
        homes: of this process's stages, by stage, the devices of all their replicas; empty without replicas.
        shard_optimizer: whether replicas share the optimizer's state.
    """

    world: World
    widths: Sequence[int]
    groups: Sequence[Sequence[int]]
    sites: Mapping[int, Site]
    homes: Mapping[int, Site] = field(default_factory=dict)
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
    def devices(self) -> Devices:
        """Of this process's seats, its own."""
        return {seat: site.own for seat, site in self.sites.items()}

    @property
    def group(self) -> Sequence[int]:
        """The ranks that share this process's seats, its own among them."""
        return self.groups[next(iter(self.sites))]

    @property
    def member(self) -> int:
        """This process's place in its group."""
        return self.group.index(self.world.rank)

    @property
    def told(self) -> Collection[int]:
        """The seats of which this process tells the others what all of their group know."""
        return self.sites.keys() if self.member == 0 else ()

    @property
    def receivers(self) -> Sequence[Sequence[int]]:
        """By seat, the ranks to which this process sends what is for it.

        Each rank of a seat gets it from one rank of the sending one: from its like if there are equally many,
        else either some send to several, or some to none.
        """
        mine, own = self.member, len(self.group)
        return [[r for i, r in enumerate(group) if i * own // len(group) == mine] for group in self.groups]

    def pieces(self, placement: Placement, chunks: Sequence[Sequence[range]]) -> list[list[Piece]]:
        """By stage, of all processes, the pieces with the layers of each chunk."""
        widths = [self.widths[placement.place(v)[0]] for v in range(placement.last + 1)]

        def piece(stage: int, chunk: int) -> Piece:
            v = placement.virtual_stage(stage, chunk)
            before, after = widths[max(v - 1, 0)], widths[min(v + 1, placement.last)]
            return Piece(chunks[stage][chunk], widths[v], Ends(before != widths[v], after != widths[v]))

        return [[piece(stage, chunk) for chunk in range(len(own))] for stage, own in enumerate(chunks)]

    def share(self, seat: int, microbatches: Sequence[Item]) -> Sequence[Item]:
        """Of what there is one of per microbatch of a step, the part that is for a seat's replica."""
        return microbatches[seat // self.stages :: self.replicas]

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

    def agreement(self, terms: Terms) -> Agreement | None:
        """What the processes of a seat agree by, made by all together; None if no seat has several."""
        return Agreement(self.world, self.groups, terms) if max(map(len, self.groups)) > 1 else None

    def transport(self, placement: Placement) -> Transport:
        """What carries outputs from piece to piece here; all processes make it together."""
        if self.world.size == 1:
            return LocalTransport()
        remote = SocketTransport(self.world, self.receivers)
        apart = len(self.sites) == 1 and placement.chunks == 1
        return remote if apart else RoutedTransport(LocalTransport(), remote)
