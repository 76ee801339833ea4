"""The memory of slots: on each device of a stage one array a slot, registered once, read by programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime._jax import address_of
from rrfp_jax.runtime.transport.nixl.agent import Agent, Memory, WriteFailed
from rrfp_jax.runtime.transport.nixl.copiers import Copiers, Program
from rrfp_jax.runtime.transport.nixl.foreseen import Foreseen, groups_of, prepare
from rrfp_jax.runtime.transport.nixl.messages import Granted
from rrfp_jax.runtime.transport.nixl.packing import ALIGNMENT, Part, cuts_of, packed
from rrfp_jax.runtime.transport.nixl.places import Give, Grow
from rrfp_jax.runtime.transport.nixl.receiver import Copy, Home
from rrfp_jax.runtime.transport.protocol import Devices, Specs


@dataclass(frozen=True)
class _Slot:
    arrays: Sequence[jax.Array]  # one on each device
    memory: Sequence[Memory]
    metadata: bytes


_DeviceCopy: TypeAlias = tuple[Program, jax.Array, Sequence[int]]
"""A program, the slot's array that it takes, and which of the message's arrays it gives."""


class Slabs:
    """All slots of a process: of each of its stages' devices, shared by the stages on the same ones.

    A slot is an array that other processes write to behind JAX's back. That is sound because a program reads
    it only when they have said that they are done, and has ended before they may write again.

    Args:
        agent: registers the memory.
        devices: of this process's stages.
        foreseen: how large slots are at the beginning, and what is copied out of them; they grow.
        count: how many there are for each stage's devices.

    Attributes:
        homes: of the stages.
        sizes: of the slots at the beginning, by slab.
    """

    def __init__(self, agent: Agent, devices: Devices, foreseen: Foreseen, count: int) -> None:
        self._agent, self._copiers = agent, Copiers(foreseen.compiler)
        self._groups = groups = groups_of(devices)
        self.homes = {stage: Home(groups.index((*own,)), len(own)) for stage, own in devices.items()}
        self.sizes = [[foreseen.slot_size(devices, group)] * count for group in groups]
        self._slots = [
            [self._made(own, size) for size in sizes] for own, sizes in zip(groups, self.sizes, strict=True)
        ]
        self._outgrown: list[list[_Slot]] = [[] for _ in groups]
        self._foreseen: list[set[Specs]] = [set() for _ in groups]  # messages, by slab
        self._copies: dict[tuple[int, int, Specs], Sequence[_DeviceCopy]] = {}  # by slab, slot, message
        self._known: dict[tuple[int, int, int], bytes] = {}  # by rank, slab, slot what it has been told

    def prepare(self, messages: Mapping[int, Collection[Specs]]) -> None:
        """Compile what copies these messages out, by stage, of slots as they are and as they may grow."""
        for stage, kinds in messages.items():
            self._foreseen[self.homes[stage].slab].update(kinds)
        for group, slots, foreseen in zip(self._groups, self._slots, self._foreseen, strict=True):
            prepare(self._copiers, group, {slot.arrays[0].size for slot in slots}, foreseen)

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
        slots[grow.slot] = self._made(self._groups[grow.slab], grow.room)
        self._copies.clear()

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
        if copy.slot is None:
            devices = self._groups[copy.slab]
            shapes = [np.empty(shape, jnp.dtype(name)) for shape, name in copy.specs]
            return [jax.device_put(shape, devices[i % len(devices)]) for i, shape in enumerate(shapes)], []
        found: dict[int, jax.Array] = {}
        ended = []
        for program, array, which in self._copies_of(copy.slab, copy.slot, copy.specs):
            *outputs, token = program(array)
            found.update(zip(which, outputs, strict=True))
            ended.append(token)
        return [found[i] for i in range(len(copy.specs))], ended

    def _copies_of(self, slab: int, slot: int, specs: Specs) -> Sequence[_DeviceCopy]:
        """By device of a slab, what copies such a message out of a slot; put together once."""
        known = self._copies.get((slab, slot, specs))
        if known is None:
            devices, arrays = self._groups[slab], self._slots[slab][slot].arrays
            lie = zip(devices, arrays, cuts_of(specs, len(devices)), strict=True)
            known = [
                (self._copiers.of(on, array.size, cuts), array, which) for on, array, (which, cuts) in lie
            ]
            self._copies[slab, slot, specs] = known
        return known

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
    """Bytes on a device, in memory that stays theirs, on a CPU perhaps NumPy's; nothing is compiled."""
    made: jax.Array = jax.device_put(np.zeros(size, np.uint8), device, may_alias=False)
    return made.block_until_ready()


def stretches_of(specs: Specs, arrays: Sequence[jax.Array], devices: int) -> list[tuple[Part, Memory]]:
    """Of a message's arrays that have bytes: where they lie, and where they belong."""
    placed = zip(packed(specs, devices).parts, arrays, strict=True)
    return [(part, memory_of(array)) for part, array in placed if part.size]
