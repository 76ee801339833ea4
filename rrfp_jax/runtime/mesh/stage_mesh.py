"""The devices that a stage runs on, and how arrays lie on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rrfp_jax.runtime._jax import DeviceCopier, HostCopier, shards_of
from rrfp_jax.runtime.model.pipeline import WHOLE
from rrfp_jax.runtime.sizes import as_sent

AXES = ("dp", "tp")
"""Axes of every stage's mesh: its replicas, and the devices that share one replica's tensors."""

Array: TypeAlias = Any
"""A `jax.Array`, or what describes one."""


class WidthChanges(NamedTuple):
    """Whether the virtual stages before and after one are on stages with another number of devices.

    What goes between such stages is whole on every device, and each process is sent one copy.
    """

    before: bool = False
    after: bool = False


Shapes: TypeAlias = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes of a message's arrays, and the names of their dtypes."""


class VirtualStage(NamedTuple):
    """Consecutive layers on one stage, which has `width` devices."""

    layers: range
    width: int
    ends: WidthChanges


@dataclass(frozen=True)
class StageMesh:
    """Devices in the order of their mesh, replica by replica; on a single one nothing is spread."""

    devices: tuple[jax.Device, ...]
    replicas: int = 1

    @cached_property
    def single(self) -> bool:
        return len(self.devices) == 1

    @cached_property
    def width(self) -> int:
        """How many devices share the tensors of a replica."""
        return len(self.devices) // self.replicas

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices).reshape(self.replicas, -1), AXES)

    @cached_property
    def own(self) -> tuple[jax.Device, ...]:
        """Devices of this process; if it has none of them, those of the process that has the first."""
        processes = [device.process_index for device in self.devices]
        here = jax.process_index() if jax.process_index() in processes else processes[0]
        return tuple(device for device in self.devices if device.process_index == here)

    @cached_property
    def _copier(self) -> DeviceCopier:
        return DeviceCopier(self.own)

    @cached_property
    def _host_copier(self) -> HostCopier:
        return HostCopier(self.device, as_sent)

    @cached_property
    def device(self) -> jax.Device:
        """The first of this process's."""
        return self.own[0]

    @cached_property
    def whole(self) -> Sharding:
        """The sharding of arrays that every device has whole."""
        return self.sharding(WHOLE)

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """The sharding of arrays spread over the mesh's axes as `spec` says."""
        return SingleDeviceSharding(self.devices[0]) if self.single else NamedSharding(self.mesh, spec)

    def like(self, other: Sharding) -> Sharding:
        """One on another stage's mesh, as it is on this one's."""
        if isinstance(other, NamedSharding) and other.mesh.axis_names == AXES:
            return self.sharding(other.spec)
        return other

    def spread(self, leaves: Iterable[Array], specs: Iterable[PartitionSpec]) -> list[jax.ShapeDtypeStruct]:
        """Specs of leaves, each with where it lies here."""
        pairs = zip(leaves, specs, strict=True)
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding(spec)) for a, spec in pairs]

    def tracing(self) -> AbstractContextManager[Any]:
        """While it is open, layers that are traced may name the mesh's axes in sharding constraints."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def put(self, values: Any, shardings: Any = None) -> Any:
        """A tree of host values, or of arrays here, as arrays on the mesh; whole without shardings."""
        if len(self.own) == len(self.devices):
            return jax.device_put(values, self.whole if shardings is None else shardings)
        if shardings is None:
            shardings = jax.tree.map(lambda _: self.whole, values)
        return jax.tree.map(_spread, values, shardings)

    def put_whole(self, values: Sequence[Any]) -> Sequence[jax.Array]:
        """Puts a list of host arrays whole on every device; see `put`."""
        return self._host_copier(values) if self.single else self.put([*map(as_sent, values)])

    def shards(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """What this process's devices have of arrays, array by array, in the order of `own`."""
        if self.single:
            return arrays
        return [shard for array in arrays for shard in shards_of(array)]

    def copies(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """One copy each of arrays that every device has."""
        return arrays if self.single else [shards_of(array)[0] for array in arrays]

    def shapes_sent(self, specs: Sequence[Array], once: bool) -> Shapes:
        """Shapes and dtypes of `shards` of arrays of these specs, or of `copies` (once), in their order."""
        if self.single or once:
            return tuple((tuple(spec.shape), spec.dtype.name) for spec in specs)
        shards = [(tuple(spec.sharding.shard_shape(spec.shape)), spec.dtype.name) for spec in specs]
        return tuple(shard for shard in shards for _ in self.own)

    def copied(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Arrays that one of this process's devices has, on all; other processes have the same ones."""
        if self.single:
            return arrays
        n, parts = len(self.own), self._copier([array for array in arrays for _ in self.own])
        make = jax.make_array_from_single_device_arrays
        return [make(a.shape, self.whole, parts[i * n : (i + 1) * n]) for i, a in enumerate(arrays)]

    def joined(self, shards: Sequence[jax.Array], specs: Sequence[Array]) -> Sequence[jax.Array]:
        """The inverse of `shards`, for arrays like these, or of these specs (with shardings)."""
        if self.single:
            return shards
        n = len(self.own)
        parts = [list(shards[i : i + n]) for i in range(0, len(shards), n)]
        make = jax.make_array_from_single_device_arrays
        return [make(s.shape, s.sharding, own) for s, own in zip(specs, parts, strict=True)]


@contextmanager
def tracing_alone() -> Iterator[None]:
    """Like `StageMesh.tracing`, for what runs on one device or nowhere, whatever mesh a user has set."""
    with jax.set_mesh(None), StageMesh((jax.local_devices()[0],)).tracing():
        yield


def _spread(value: Any, sharding: Sharding) -> jax.Array:
    """A global array of which this process makes its own shards: `device_put` would ask all processes."""
    value = np.asarray(value)
    return from_shards(value.shape, sharding, lambda index: value[index])


def from_shards(shape: tuple[int, ...], sharding: Sharding, shard_of: Callable[[Any], Any]) -> jax.Array:
    """`jax.make_array_from_callback`, in which JAX's guards see a transfer that nobody asked for."""
    with jax.transfer_guard("allow"):
        return jax.make_array_from_callback(shape, sharding, shard_of)
