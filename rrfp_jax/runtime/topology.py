"""The mesh a user asks for, and the processes and devices that its stages get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.tasks import Placement, Shape
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import provide_cpu_devices
from rrfp_jax.runtime.join import join
from rrfp_jax.runtime.routed_transport import RoutedTransport
from rrfp_jax.runtime.socket_transport import SocketTransport
from rrfp_jax.runtime.transport import LocalTransport, Transport
from rrfp_jax.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many pipeline stages there are, what part of the model each has, and where they run.

    Attributes:
        pp: number of pipeline stages, one device each. Of several processes each takes equally many.
        chunks: pieces of the model that each stage has; None for as many as the schedule is made for.
        shape: where several chunks go: "looped" (stage 0 to the last, again and again) or "v" (there and
            back). Without `chunks` the schedule's own.
        share_devices: let several stages run on one device when there are fewer devices than stages; they
            then take turns, so this is for trying things out, not for speed.

    Raises:
        UsageError: fewer than one stage or chunk, or an unknown shape.
    """

    pp: int = 1
    chunks: int | None = None
    shape: Shape = "looped"
    share_devices: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pp, int) or self.pp < 1:
            raise UsageError(
                f"Mesh(pp={self.pp!r}): a pipeline needs a whole number of stages, at least one stage"
            )
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

        Without accelerators, asks JAX for as many virtual CPU devices as the process has stages.

        Raises:
            UsageError: fewer devices than stages, or stages that cannot be shared out evenly.
            TrainingError: the other processes of the run cannot be reached.
        """
        world = join()
        if self.pp % world.size:
            raise UsageError(
                f"Mesh(pp={self.pp}) on {world.size} processes: every process takes equally many stages, so "
                f"start {self.pp} processes, or a number that divides {self.pp}"
            )
        count = self.pp // world.size
        owners = [stage // count for stage in range(self.pp)]
        world.stages = [_name(range(r * count, (r + 1) * count)) for r in range(world.size)]
        world.box.runs(world.stages[world.rank])
        own = [stage for stage, rank in enumerate(owners) if rank == world.rank]
        return Layout(world, owners, dict(zip(own, self._devices(count), strict=True)))

    def _devices(self, count: int) -> list[jax.Device]:
        """One device per stage of this process."""
        if not self.share_devices:
            provide_cpu_devices(count)
        devices: Sequence[jax.Device] = jax.local_devices()
        if len(devices) < count and not self.share_devices:
            cause = (
                "JAX was already in use when the mesh was made, so no virtual CPU devices could be added: "
                f"call jax.config.update('jax_num_cpu_devices', {count}) first thing in the program "
                "(in a notebook: restart the kernel)"
                if devices[0].platform == "cpu"
                else "use fewer stages"
            )
            raise UsageError(
                f"Mesh(pp={self.pp}) needs {count} devices and this process has {len(devices)} "
                f"({devices[0].platform}): {cause}, or let stages share a device: "
                f"Mesh(pp={self.pp}, share_devices=True)"
            )
        return [devices[stage % len(devices)] for stage in range(count)]


@dataclass(frozen=True)
class Layout:
    """Where the stages of a mesh are.

    Attributes:
        world: the processes.
        owners: the rank of each stage.
        devices: of this process's stages, by stage.
    """

    world: World
    owners: Sequence[int]
    devices: Mapping[int, jax.Device]

    def transport(self, placement: Placement) -> Transport:
        """What carries outputs from piece to piece here; all processes make it together."""
        if self.world.size == 1:
            return LocalTransport()
        remote = SocketTransport(self.world, self.owners)
        apart = len(self.devices) == 1 and placement.chunks == 1
        return remote if apart else RoutedTransport(LocalTransport(), remote)


def _name(stages: range) -> str:
    """Stages as messages name them."""
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
