"""The memory of slots: on each device of a stage one array a slot, registered once, read by programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime._jax import address_of
from rrfp_jax.runtime.transport.nixl.agent import Agent, Memory, WriteFailed
from rrfp_jax.runtime.transport.nixl.messages import Granted, Specs
from rrfp_jax.runtime.transport.nixl.packing import ALIGNMENT, Part, packed
from rrfp_jax.runtime.transport.nixl.places import Give, Grow
from rrfp_jax.runtime.transport.nixl.receiver import Copy, Home
from rrfp_jax.runtime.transport.protocol import Devices

Cut: TypeAlias = tuple[int, tuple[int, ...], str]
"""Where an array begins in its slot, its shape, and its dtype's name."""


@dataclass(frozen=True)
class _Slot:
    arrays: Sequence[jax.Array]  # one on each device
    memory: Sequence[Memory]
    metadata: bytes


class Slabs:
    """All slots of a process: of each of its stages' devices, shared by the stages on the same ones.

    A slot is an array that other processes write to behind JAX's back. That is sound because a program reads
    it only when they have said that they are done, and has ended before they may write again.

    Args:
        agent: registers the memory.
        devices: of this process's stages.
        room: bytes that slots have at the beginning, by stage.
        count: how many there are for each stage's devices.

    Attributes:
        homes: of the stages.
        sizes: of the slots at the beginning, by slab.
    """

    def __init__(self, agent: Agent, devices: Devices, room: Mapping[int, int], count: int) -> None:
        self._agent = agent
        groups = list(dict.fromkeys(tuple(own) for own in devices.values()))
        self.homes = {stage: Home(groups.index(tuple(own)), len(own)) for stage, own in devices.items()}
        most = [
            max(room[s] for s, home in self.homes.items() if home.slab == slab) for slab in range(len(groups))
        ]
        self.sizes = [[size] * count for size in most]
        self._devices = groups
        self._slots = [
            [self._made(own, size) for size in sizes] for own, sizes in zip(groups, self.sizes, strict=True)
        ]
        self._outgrown: list[list[_Slot]] = [[] for _ in groups]
        self._known: dict[tuple[int, int, int], bytes] = {}  # by rank, slab, slot what it has been told

    def nbytes(self) -> dict[int, int]:
        """What slots take of a device's memory, by stage; the second stage on the same devices has none."""
        sizes = [
            sum(slot.arrays[0].nbytes for slot in (*slots, *outgrown))
            for slots, outgrown in zip(self._slots, self._outgrown, strict=True)
        ]
        found: dict[int, int] = {}
        for stage, home in self.homes.items():
            found[stage], sizes[home.slab] = sizes[home.slab], 0
        return found

    def grow(self, grow: Grow) -> None:
        """Give a slot more memory; nobody uses it.

        What it had stays: others remember that memory, and must not take something else for it.
        """
        slots = self._slots[grow.slab]
        self._outgrown[grow.slab].append(slots[grow.slot])
        slots[grow.slot] = self._made(self._devices[grow.slab], grow.room)

    def granted(self, give: Give) -> Granted:
        """What to tell a rank of its place."""
        slot, where = self._slots[give.slab][give.slot], (give.rank, give.slab, give.slot)
        new = self._known.get(where) != slot.metadata
        self._known[where] = slot.metadata
        at = tuple((memory.address, memory.device) for memory in slot.memory)
        return Granted(give.place, give.stage, give.number, give.room, at, slot.metadata if new else b"")

    def copy(self, copy: Copy) -> tuple[list[jax.Array], list[jax.Array]]:
        """Begin to copy a message out.

        Returns:
            Its arrays, and one for each device that is ready when its part has been copied.
        """
        devices = self._devices[copy.slab]
        if copy.slot is None:
            shapes = [np.empty(shape, jnp.dtype(name)) for shape, name in copy.specs]
            return [jax.device_put(shape, devices[i % len(devices)]) for i, shape in enumerate(shapes)], []
        placed = list(zip(packed(copy.specs, len(devices)).parts, copy.specs, strict=True))
        found: dict[int, jax.Array] = {}
        ended = []
        for device, array in enumerate(self._slots[copy.slab][copy.slot].arrays):
            mine = [(i, part, spec) for i, (part, spec) in enumerate(placed) if part.device == device]
            *outputs, token = copier(tuple((part.offset, *spec) for _, part, spec in mine))(array)
            found.update(zip((i for i, _, _ in mine), outputs, strict=True))
            ended.append(token)
        return [found[i] for i in range(len(copy.specs))], ended

    def _made(self, devices: Sequence[jax.Device], size: int) -> _Slot:
        # Never read whole: an output that is all of an input would be that input, and not a copy.
        arrays = [zeros(size + ALIGNMENT, device) for device in devices]
        memory = [memory_of(array) for array in arrays]
        try:
            self._agent.register(memory)
        except WriteFailed as error:
            raise TrainingError(
                f"NIXL cannot register {size + ALIGNMENT} bytes on {devices[0]} for messages: {error}; take "
                f"transport='socket', or see docs/transport.md"
            ) from None
        return _Slot(arrays, memory, self._agent.describe(memory))


def memory_of(array: jax.Array) -> Memory:
    """Where an array on one device is, once it is ready: NIXL waits for no program."""
    array.block_until_ready()
    return Memory(address_of(array), array.nbytes, device_number(array.device))  # type: ignore[arg-type]


def device_number(device: jax.Device) -> int:
    """As CUDA counts; 0 for the host's memory."""
    return 0 if device.platform == "cpu" else int(device.local_hardware_id)


def zeros(size: int, device: jax.Device) -> jax.Array:
    """Bytes on a device."""
    make = jax.jit(partial(jnp.zeros, size, jnp.uint8), out_shardings=SingleDeviceSharding(device))
    return jax.block_until_ready(make())  # type: ignore[no-any-return]


@lru_cache(maxsize=512)
def copier(cuts: tuple[Cut, ...]) -> Callable[[jax.Array], Any]:
    """The program that copies arrays out of a slot; its last output is ready when it has ended.

    That one is nobody else's: the others may be donated to the program that takes them.
    """

    def copy(slot: jax.Array) -> list[jax.Array]:
        return [*(_array(slot, *cut) for cut in cuts), slot[0]]

    return jax.jit(copy)


def _array(slot: jax.Array, offset: int, shape: tuple[int, ...], name: str) -> jax.Array:
    dtype = jnp.dtype(name)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = slot[offset : offset + size]
    if jnp.issubdtype(dtype, jnp.bool_):
        return (raw != 0).reshape(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _cast(raw, np.finfo(dtype).dtype).reshape(*shape, 2)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    info: Any = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    if info(dtype).bits < 8:  # kept one in a byte
        raw = raw.astype(f"uint{info(dtype).bits}")
    return _cast(raw, dtype).reshape(shape)


def _cast(raw: jax.Array, dtype: Any) -> jax.Array:
    width = dtype.itemsize
    return jax.lax.bitcast_convert_type(raw if width == 1 else raw.reshape(-1, width), dtype)


def stretches_of(specs: Specs, arrays: Sequence[jax.Array], devices: int) -> list[tuple[Part, Memory]]:
    """Of a message's arrays that have bytes: where they lie, and where they belong."""
    placed = zip(packed(specs, devices).parts, arrays, strict=True)
    return [(part, memory_of(array)) for part, array in placed if part.size]
