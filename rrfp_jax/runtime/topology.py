"""The mesh a user asks for, and the processes and devices that its stages get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.tasks import Placement, Shape
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import provide_cpu_devices
from rrfp_jax.runtime.agreement import Agreement, Terms
from rrfp_jax.runtime.join import join
from rrfp_jax.runtime.routed_transport import RoutedTransport
from rrfp_jax.runtime.socket_transport import SocketTransport
from rrfp_jax.runtime.transport import LocalTransport, Transport
from rrfp_jax.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many pipeline stages there are, what part of the model each has, and where they run.

    Attributes:
        pp: number of pipeline stages. Of several processes each takes equally many, or an equal part of one.
        tp: number of devices of each stage. Device `stage * tp + t` is the stage's t-th.
        chunks: pieces of the model that each stage has; None for as many as the schedule is made for.
        shape: where several chunks go: "looped" (stage 0 to the last, again and again) or "v" (there and
            back). Without `chunks` the schedule's own.
        share_devices: let several stages run on one device when there are fewer devices than stages; they
            then take turns, so this is for trying things out, not for speed.

    Raises:
        UsageError: fewer than one stage, device or chunk, or an unknown shape.
    """

    pp: int = 1
    tp: int = 1
    chunks: int | None = None
    shape: Shape = "looped"
    share_devices: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pp, int) or self.pp < 1:
            raise UsageError(
                f"Mesh(pp={self.pp!r}): a pipeline needs a whole number of stages, at least one stage"
            )
        if not isinstance(self.tp, int) or self.tp < 1:
            raise UsageError(f"Mesh(tp={self.tp!r}): a stage has a whole number of devices, at least one")
        if self.chunks is not None and (not isinstance(self.chunks, int) or self.chunks < 1):
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

    def lay_out(self) -> Layout:
        """Take this process's place in the run, and give each of its stages a device.

        Without accelerators, asks JAX for as many virtual CPU devices as the process needs.

        Raises:
            UsageError: fewer devices than needed, or devices that cannot be shared out evenly.
            TrainingError: the other processes of the run cannot be reached.
        """
        world = join()
        groups = self.groups(world.size)
        own = [stage for stage, group in enumerate(groups) if world.rank in group]
        of_rank = [[s for s, group in enumerate(groups) if rank in group] for rank in range(world.size)]
        world.stages = [_name(stages) for stages in of_rank]
        world.box.runs(world.stages[world.rank])
        count = self.pp * self.tp // world.size
        devices = self._devices(count)
        return Layout(world, groups, dict(zip(own, devices[:: count // len(own)], strict=True)))

    def groups(self, processes: int) -> list[list[int]]:
        """By stage, the ranks of its processes in the order of their devices, if there are so many.

        Raises:
            UsageError: the devices cannot be shared out evenly.
        """
        total = self.pp * self.tp

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
        first = [stage * self.tp // share for stage in range(self.pp)]
        return [list(range(rank, rank + max(self.tp // share, 1))) for rank in first]

    @property
    def _named(self) -> str:
        return f"Mesh(pp={self.pp}, tp={self.tp})" if self.tp > 1 else f"Mesh(pp={self.pp})"

    def _devices(self, count: int) -> list[jax.Device]:
        """The devices of this process's stages, stage by stage."""
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
        return [devices[number % len(devices)] for number in range(count)]


@dataclass(frozen=True)
class Layout:
    """Where the stages of a mesh are.

    Attributes:
        world: the processes.
        groups: by stage, the ranks of its processes in the order of their devices; equally many for each.
        devices: of this process's stages, by stage.
    """

    world: World
    groups: Sequence[Sequence[int]]
    devices: Mapping[int, jax.Device]

    @property
    def group(self) -> Sequence[int]:
        """The ranks that share this process's stages, its own among them."""
        return self.groups[next(iter(self.devices))]

    @property
    def member(self) -> int:
        """This process's place in its group."""
        return self.group.index(self.world.rank)

    @property
    def owners(self) -> Sequence[int]:
        """By stage, the rank that this process exchanges messages with: its like in the stage's group."""
        return [group[self.member] for group in self.groups]

    def agreement(self, terms: Terms) -> Agreement | None:
        """What the processes of a stage agree by, if stages have several; all processes make it together."""
        return Agreement(self.world, self.groups, terms) if len(self.group) > 1 else None

    def transport(self, placement: Placement) -> Transport:
        """What carries outputs from piece to piece here; all processes make it together."""
        if self.world.size == 1:
            return LocalTransport()
        remote = SocketTransport(self.world, self.owners)
        apart = len(self.devices) == 1 and placement.chunks == 1
        return remote if apart else RoutedTransport(LocalTransport(), remote)


def _name(stages: Sequence[int]) -> str:
    """Stages as messages name them."""
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
