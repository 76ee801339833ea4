"""The mesh a user asks for, and the processes and devices that its stages get."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import jax

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.tasks import Placement, Shape
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import provide_cpu_devices
from rrfp_jax.runtime.agreement import Agreement, Terms
from rrfp_jax.runtime.join import join
from rrfp_jax.runtime.routed_transport import RoutedTransport
from rrfp_jax.runtime.site import Site
from rrfp_jax.runtime.socket_transport import SocketTransport
from rrfp_jax.runtime.transport import Devices, LocalTransport, Transport
from rrfp_jax.runtime.world import World

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many pipeline stages there are, what part of the model each has, and where they run.

    Attributes:
        pp: number of pipeline stages. Of several processes each takes equally many, or an equal part of one.
        tp: number of devices that share each stage's tensors.
        dp: number of replicas of the whole pipeline; each takes every dp-th microbatch of a step. Device
            `(stage * dp + replica) * tp + t` is the t-th of a stage in a replica.
        chunks: pieces of the model that each stage has; None for as many as the schedule is made for.
        shape: where several chunks go: "looped" (stage 0 to the last, again and again) or "v" (there and
            back). Without `chunks` the schedule's own.
        shard_optimizer: spread the optimizer's state over replicas, instead of giving each of them all of it.
        share_devices: let several stages run on one device when there are fewer devices than stages; they
            then take turns, so this is for trying things out, not for speed.

    Raises:
        UsageError: fewer than one stage, device or chunk, or an unknown shape.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    chunks: int | None = None
    shape: Shape = "looped"
    share_devices: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        if not _is_count(self.pp):
            raise UsageError(
                f"Mesh(pp={self.pp!r}): a pipeline needs a whole number of stages, at least one stage"
            )
        if not _is_count(self.tp):
            raise UsageError(f"Mesh(tp={self.tp!r}): a stage has a whole number of devices, at least one")
        if not _is_count(self.dp):
            raise UsageError(f"Mesh(dp={self.dp!r}): there is a whole number of replicas, at least one")
        if self.chunks is not None and not _is_count(self.chunks):
            raise UsageError(
                f"Mesh(chunks={self.chunks!r}): every stage has a whole number of them, at least one"
            )
        if self.shape not in ("looped", "v"):
            raise UsageError(f"Mesh(shape={self.shape!r}): choose 'looped' or 'v'")

    def placement(self, schedule: Schedule) -> Placement:
        """Which stage has which pieces of the model, where it is the schedule's to say.

        Raises:
            UsageError: the schedule is an order for another number of stages; or a shape without chunks, of
                which the schedule has but one.
        """
        if self.chunks is not None:
            return Placement(self.pp, self.chunks, self.shape)
        try:
            placement = schedule.placement_for(self.pp)
        except ValueError as error:
            raise UsageError(f"Mesh(pp={self.pp}): {error}") from None
        if self.shape == "v" and placement.shape != "v":
            raise UsageError(f"Mesh(pp={self.pp}, shape='v'): one chunk a stage has no shape; give chunks=2")
        return placement

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return self.pp * self.dp * self.tp

    def lay_out(self) -> Layout:
        """Take this process's place in the run, and give each of its stages its devices.

        Without accelerators, asks JAX for as many virtual CPU devices as the process needs.

        Raises:
            UsageError: fewer devices than needed, or devices that cannot be shared out evenly.
            TrainingError: the other processes of the run cannot be reached.
        """
        world = join()
        groups = self.groups(world.size)
        share = self.devices // world.size
        of_rank = {world.rank: self._own_devices(share)}
        if (world.size > 1 and share % self.tp) or self.dp > 1:
            others = [r for r in range(world.size) if r != world.rank]
            of_rank |= {r: self._shared_out(_devices_of(r), share) for r in others}
        seats = [[s for s, group in enumerate(groups) if r in group] for r in range(world.size)]
        world.stages = [self._name(own) for own in seats]
        world.box.runs(world.stages[world.rank])

        def site(first: int, count: int, replicas: int = 1) -> Site:
            return Site(tuple(of_rank[i // share][i % share] for i in range(first, first + count)), replicas)

        own = seats[world.rank]
        sites = {seat: site(self._first_device(seat), self.tp) for seat in own}
        homes = {seat % self.pp: self._first_device(seat % self.pp) for seat in own}
        return Layout(
            world=world,
            stages=self.pp,
            groups=groups,
            sites=sites,
            shard_optimizer=self.shard_optimizer and self.dp > 1,
            homes={s: site(first, self.dp * self.tp, self.dp) for s, first in homes.items() if self.dp > 1},
        )

    def groups(self, processes: int) -> list[list[int]]:
        """By seat, the ranks of its processes in the order of their devices, if there are so many.

        Raises:
            UsageError: the devices cannot be shared out evenly.
        """
        total = self.devices

        def fits(number: int) -> bool:
            share, rest = divmod(total, number)
            return not rest and (share % self.tp == 0 or self.tp % share == 0)

        if processes > total or not fits(processes):
            numbers = [number for number in range(1, total + 1) if fits(number)]
            raise UsageError(
                f"{self._named} on {processes} processes: every process takes equally many stages"
                f"{', or an equal part of one' if self.tp > 1 else ''}, so start {total} processes, or "
                f"another number of {', '.join(map(str, numbers))}"
            )
        share = total // processes  # devices of a process
        first = [self._first_device(seat) // share for seat in range(self.pp * self.dp)]
        return [list(range(rank, rank + max(self.tp // share, 1))) for rank in first]

    def _first_device(self, seat: int) -> int:
        """Replicas of a stage are neighbours: they exchange gradients, stages only activations."""
        replica, stage = divmod(seat, self.pp)
        return (stage * self.dp + replica) * self.tp

    @property
    def _named(self) -> str:
        sizes = {"pp": self.pp, "tp": self.tp, "dp": self.dp}
        given = [f"{name}={size}" for name, size in sizes.items() if name == "pp" or size > 1]
        return f"Mesh({', '.join(given)})"

    def _name(self, seats: Sequence[int]) -> str:
        """Seats as messages name them: "stage 2", "stages 2-3", "stage 2 of replica 1"."""
        stages, replicas = sorted({s % self.pp for s in seats}), sorted({s // self.pp for s in seats})
        if len(seats) < len(stages) * len(replicas):
            return ", ".join(self._name([seat]) for seat in seats)
        named = _numbered("stage", stages)
        return named if self.dp == 1 else f"{named} of {_numbered('replica', replicas)}"

    def _own_devices(self, count: int) -> list[jax.Device]:
        """The devices of this process's stages, in the order of the mesh."""
        if not self.share_devices:
            provide_cpu_devices(count)
        devices: Sequence[jax.Device] = jax.local_devices()
        if len(devices) < count and not self.share_devices:
            cause = (
                "JAX was already in use when the mesh was made, so no virtual CPU devices could be added: "
                f"call jax.config.update('jax_num_cpu_devices', {count}) first thing in the program "
                "(in a notebook: restart the kernel)"
                if devices[0].platform == "cpu"
                else "use fewer stages, or more processes"
            )
            raise UsageError(
                f"{self._named} needs {count} devices and this process has {len(devices)} "
                f"({devices[0].platform}): {cause}, or let stages share a device: "
                f"{self._named[:-1]}, share_devices=True)"
            )
        at_once = self._at_once(count)
        if len(devices) < at_once:
            raise UsageError(
                f"{self._named[:-1]}, share_devices=True): stages may share devices, but one stage needs "
                f"{at_once} different ones, and this process has {len(devices)} ({devices[0].platform})"
            )
        return self._shared_out(devices, count)

    def _at_once(self, count: int) -> int:
        """How many of a process's `count` devices one program may run on."""
        return min(self.tp * self.dp, count)

    def _shared_out(self, devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
        """A process's devices in the order of the mesh, again and again if stages share them."""
        usable = len(devices) - len(devices) % self._at_once(count)
        return [devices[number % usable] for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the stages of a mesh are.

    A *seat* is a stage of one replica of the model, number `replica * stages + stage`; without data
    parallelism, seats are stages. What the runtime numbers by stage is numbered by seat.

    Attributes:
        world: the processes.
        stages: number of pipeline stages.
        groups: by seat, the ranks of its processes in the order of their devices; equally many for each.
        sites: of this process's seats, by seat.
        homes: of this process's stages, by stage, the devices of all their replicas; empty without replicas.
        shard_optimizer: whether replicas share the optimizer's state.
    """

    world: World
    stages: int
    groups: Sequence[Sequence[int]]
    sites: Mapping[int, Site]
    homes: Mapping[int, Site] = field(default_factory=dict)
    shard_optimizer: bool = False

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
    def owners(self) -> Sequence[int]:
        """By seat, the rank that this process exchanges messages with: its like in the seat's group."""
        return [group[self.member] for group in self.groups]

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
        """What the processes of a seat agree by, if it has several; all processes make it together."""
        return Agreement(self.world, self.groups, terms) if len(self.group) > 1 else None

    def transport(self, placement: Placement) -> Transport:
        """What carries outputs from piece to piece here; all processes make it together."""
        if self.world.size == 1:
            return LocalTransport()
        remote = SocketTransport(self.world, self.owners)
        apart = len(self.sites) == 1 and placement.chunks == 1
        return remote if apart else RoutedTransport(LocalTransport(), remote)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _devices_of(rank: int) -> list[jax.Device]:
    """Those of another process, in the order in which it sees them itself."""
    return sorted((d for d in jax.devices() if d.process_index == rank), key=lambda device: device.id)


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]}-{numbers[-1]}"
