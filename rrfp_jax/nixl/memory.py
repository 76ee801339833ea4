"""Where the bytes of messages lie: in slots, which both ends work out alike, and how they get out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import TrainingError
from rrfp_jax.nixl.agent import Agent, MemoryRange, WriteFailed
from rrfp_jax.runtime._jax import address_of
from rrfp_jax.runtime.transport.protocol import Devices, Messages, OneArrayCompiler, Program, Specs

ALIGNMENT = 256
"""Bytes: what GPUs align allocations to, and more than any dtype needs."""

MOST_ARRAYS = 16
"""Most arrays of a message, so that each may begin at a multiple of what devices align to."""

LEAST_ROOM = 2**12
"""Bytes of a slot for messages of which nothing is known."""

Group: TypeAlias = tuple[jax.Device, ...]
"""Devices of this process which one or several of its stages are on; one slab is theirs."""

Cut: TypeAlias = tuple[int, tuple[int, ...], str]
"""Where an array begins in its slot, its shape, and its dtype's name."""


class PackedArray(NamedTuple):
    """Where one array lies: on which of the stage's devices, from which byte of its slot, how many."""

    device: int
    offset: int
    size: int


class Packing(NamedTuple):
    """Where all arrays of a message lie, and how many bytes of each device's slot that takes."""

    parts: Sequence[PackedArray]
    size: int


@lru_cache(maxsize=1024)
def packed(specs: Specs, devices: int) -> Packing:
    """Lay out arrays, which go to the devices of the receiving stage in turn, one after another on each."""
    if any(length < 0 for shape, _ in specs for length in shape):
        raise ValueError("an array of negative length")
    parts, used = [], [0] * devices
    for i, (shape, dtype) in enumerate(specs):
        at, size = i % devices, prod(shape) * jnp.dtype(dtype).itemsize
        parts.append(PackedArray(at, used[at], size))
        used[at] += -(-size // ALIGNMENT) * ALIGNMENT
    return Packing(parts, max(used))


@lru_cache(maxsize=1024)
def cuts_of(specs: Specs, devices: int) -> Sequence[tuple[Sequence[int], tuple[Cut, ...]]]:
    """By device of a stage, which of a message's arrays lie in its slot, and where."""
    parts = packed(specs, devices).parts
    own = [[i for i, part in enumerate(parts) if part.device == device] for device in range(devices)]
    return [(which, tuple((parts[i].offset, *specs[i]) for i in which)) for which in own]


def room_for(largest: int) -> int:
    """Bytes of a slot, on each device, for messages of so many."""
    return max(largest, LEAST_ROOM) + MOST_ARRAYS * ALIGNMENT


def by_slab(devices: Devices, messages: Messages) -> dict[Group, list[Specs]]:
    """The devices of each slab, and the messages to the stages on them."""
    found: dict[Group, list[Specs]] = {}
    for stage, own in devices.items():
        found.setdefault((*own,), []).extend(messages.get(stage, ()))
    return found


def slot_size(messages: Iterable[Specs], group: Group) -> int:
    """Bytes of each slot of these devices at the beginning."""
    return max((packed(specs, len(group)).size for specs in messages), default=0) or room_for(0)


def memory_of(array: jax.Array) -> MemoryRange:
    """Where an array on one device is, once it is ready: NIXL waits for no program."""
    array.block_until_ready()
    device: Any = array.device
    number = 0 if device.platform == "cpu" else int(device.local_hardware_id)  # as CUDA counts
    return MemoryRange(address_of(array), array.nbytes, number)


def zeros(size: int, device: jax.Device) -> jax.Array:
    """Bytes on a device, in memory that stays theirs, on a CPU perhaps NumPy's; nothing is compiled."""
    made: jax.Array = jax.device_put(np.zeros(size, np.uint8), device, may_alias=False)
    return made.block_until_ready()


class Copiers:
    """Programs from a slot to the arrays in it; their last output says when each has ended, and stays."""

    def __init__(self, compiler: OneArrayCompiler) -> None:
        self._compiler = compiler
        self._made: dict[tuple[jax.Device, int, tuple[Cut, ...]], Program] = {}

    def of(self, device: jax.Device, size: int, cuts: tuple[Cut, ...]) -> Program:
        """The program that makes these cuts from a slot of so many bytes on a device."""
        key = device, size, cuts
        if (made := self._made.get(key)) is None:

            def copy(slot: jax.Array) -> list[jax.Array]:
                return [*(_array(slot, *cut) for cut in cuts), slot[0]]

            made = self._made[key] = self._compiler(device, copy, jax.ShapeDtypeStruct((size,), np.uint8))
        return made

    def prepare(self, group: Group, sizes: set[int], messages: Iterable[Specs]) -> None:
        """Compile what copies messages out of slots of these sizes, and of slots that grow for one."""
        needs = {specs: packed(specs, len(group)).size + ALIGNMENT for specs in messages}
        grown = {need for need in needs.values() if need > min(sizes)}
        for (specs, need), size in product(needs.items(), sizes | grown):
            if ALIGNMENT < need <= size:  # one without bytes takes no slot
                for device, (_, cuts) in zip(group, cuts_of(specs, len(group)), strict=True):
                    self.of(device, size, cuts)


def _array(slot: jax.Array, offset: int, shape: tuple[int, ...], name: str) -> jax.Array:
    dtype = jnp.dtype(name)
    raw = slot[offset : offset + prod(shape) * dtype.itemsize]
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


class Slot(NamedTuple):
    """The memory of a slot: on each device an array; what others must know of it."""

    arrays: Sequence[jax.Array]
    memory: Sequence[MemoryRange]
    metadata: bytes


class Slabs:
    """The memory of all slots of a process: `count` for the devices of each of its stages.

    A slot is an array that other processes write to behind JAX's back. That is sound because a program reads
    it only when they have said that they are done, and has ended before they may write again. Slots have no
    bytes before they grow.
    """

    def __init__(self, agent: Agent, devices: Devices, compiler: OneArrayCompiler, count: int) -> None:
        self._agent, self._devices, self._copiers = agent, devices, Copiers(compiler)
        self.groups = [*by_slab(devices, {})]
        self._slots: list[list[list[Slot]]] = [[[] for _ in range(count)] for _ in self.groups]  # last counts
        self._foreseen: list[set[Specs]] = [set() for _ in self.groups]  # messages, by slab
        self._told: dict[tuple[int, int, int], bytes] = {}  # metadata by rank, slab, slot

    def prepare(self, messages: Messages) -> None:
        """Compile what copies these messages out of slots as they are, and as they may grow."""
        new = by_slab(self._devices, messages)
        for group, slots, foreseen in zip(self.groups, self._slots, self._foreseen, strict=True):
            foreseen.update(new[group])
            self._copiers.prepare(group, {slot[-1].arrays[0].size for slot in slots}, foreseen)

    def nbytes(self) -> dict[int, int]:
        """What slots take of a device's memory, by stage; the second stage on the same devices has none."""
        sizes = [sum(each.memory[0].size for slot in slots for each in slot) for slots in self._slots]
        found: dict[int, int] = {}
        for stage, own in self._devices.items():
            slab = self.groups.index((*own,))
            found[stage], sizes[slab] = sizes[slab], 0
        return found

    def grow(self, slab: int, slot: int, room: int) -> None:
        """Give a slot that nobody uses more memory; what it had stays, as others remember that address."""
        devices, size = self.groups[slab], room + ALIGNMENT
        # Never read whole: an output that is all of an input would be that input, and not a copy.
        arrays = [zeros(size, device) for device in devices]
        memory = [memory_of(array) for array in arrays]
        try:
            self._agent.register(memory)
        except WriteFailed as error:
            raise TrainingError(
                f"NIXL cannot register {size} bytes on {devices[0]} for messages: {error}; take "
                f"transport='socket', or see docs/transport.md"
            ) from None
        self._slots[slab][slot].append(Slot(arrays, memory, self._agent.describe(memory)))

    def address(self, rank: int, slab: int, slot: int) -> tuple[tuple[tuple[int, int], ...], bytes]:
        """Where a slot is on each device, and what a rank does not know of that memory yet."""
        own, where = self._slots[slab][slot][-1], (rank, slab, slot)
        new = self._told.get(where) != own.metadata
        self._told[where] = own.metadata
        at = tuple((memory.address, memory.device) for memory in own.memory)
        return at, own.metadata if new else b""

    def copy(self, slab: int, slot: int | None, specs: Specs) -> tuple[list[jax.Array], list[jax.Array]]:
        """Begin to copy a message out of its slot, if it has bytes; tokens say when the copies have ended."""
        devices = self.groups[slab]
        if slot is None:
            empty = [np.empty(shape, jnp.dtype(name)) for shape, name in specs]
            return [jax.device_put(array, devices[i % len(devices)]) for i, array in enumerate(empty)], []
        found: dict[int, jax.Array] = {}
        ended = []
        own = zip(devices, self._slots[slab][slot][-1].arrays, cuts_of(specs, len(devices)), strict=True)
        for device, array, (which, cuts) in own:
            *outputs, token = self._copiers.of(device, array.size, cuts)(array)
            found.update(zip(which, outputs, strict=True))
            ended.append(token)
        return [found[i] for i in range(len(specs))], ended
