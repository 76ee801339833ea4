"""The receiver's end: it gives places, and takes what was written. Theory of operation: `messages.py`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime._jax import address_of
from rrfp_jax.runtime.transport.nixl.agent import Agent, Memory, WriteFailed
from rrfp_jax.runtime.transport.nixl.copies import ALIGNMENT, Copiers, Part, Program, cuts_of, packed
from rrfp_jax.runtime.transport.nixl.messages import Ask, Dropped, Granted, Refused, Unwanted, Written
from rrfp_jax.runtime.transport.nixl.slots import (
    AHEAD,
    Foreseen,
    Gift,
    Give,
    Grow,
    Places,
    Request,
    Slots,
    groups_of,
    prepare,
)
from rrfp_jax.runtime.transport.protocol import Devices, Key, Specs


class Home(NamedTuple):
    """Where a stage's messages go: a slab, and how many devices it spans."""

    slab: int
    devices: int


class Copy(NamedTuple):
    """Copy a message out of its slot, and tell `copied` when that has ended.

    Attributes:
        place, slot: None if it has no bytes; then nobody need be told.
    """

    rank: int
    key: Key
    specs: Specs
    ended: float
    place: int | None
    slab: int
    slot: int | None


class Decline(NamedTuple):
    """Tell a rank that a message for which it asked is unwanted."""

    rank: int
    message: Unwanted


Instruction: TypeAlias = Gift | Copy | Decline


@dataclass
class _Asked:
    """A message for which a place was asked, until its sender ends it.

    Attributes:
        size: bytes of a slot that it takes.
        state: `early`: for a later round, without a place; `asking`: for a place; `placed`: may be written;
            `unwanted`: it will not be taken.
    """

    key: Key
    size: int
    state: Literal["early", "asking", "placed", "unwanted"] = "early"
    place: int | None = None


class Receiver:
    """One process's end. Each event gives the instructions that follow from it, in order.

    Args:
        slabs: their slots, at least two each.
        homes: by stage of this process.
        ahead: places given ahead, for each sender and stage.
    """

    def __init__(self, slabs: Sequence[Slots], homes: Mapping[int, Home], ahead: int = AHEAD) -> None:
        self._places, self._homes = Places(slabs, ahead), homes
        self._round, self._over = 0, True
        self._asked: dict[tuple[int, int], _Asked] = {}  # by rank and number
        self._latest: dict[int, int] = {}  # number by rank
        self._taken: set[Key] = set()  # written in this round, or a later one
        self._early: list[tuple[int, Written]] = []  # by rank, for later rounds

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a slot."""
        return self._places.awaited

    @property
    def idle(self) -> bool:
        """Whether everybody who asked has had an answer, and everything written has been taken."""
        return not self._asked and not self._early

    def begin(self, round: int) -> list[Instruction]:
        """A round begins; of earlier ones nothing more is wanted."""
        self._round, self._over = round, False
        done = self._discard()
        early, self._early = self._early, []
        for rank, said in early:
            done += self._take(rank, said)
        for (rank, number), asked in self._asked.items():
            if asked.key.round == round and asked.state == "early":
                self._ask(rank, number, asked)
        return done + self._given(self._places.serve())

    def reset(self) -> list[Instruction]:
        """The round is broken off."""
        self._over = True
        return self._discard() + self._given(self._places.serve())

    def asked(self, rank: int, ask: Ask) -> list[Instruction]:
        """A rank needs a place.

        Raises:
            Refused: it has asked before, for another process, or returns a place that is not its own.
        """
        number, key = ask.number, ask.key
        size = self._size(rank, key, ask.specs)
        if number <= self._latest.get(rank, 0) or not size:
            raise Refused(rank, f"asks for a place for the {key} {'again' if size else 'of no bytes'}")
        for place in ask.returned:
            own = self._places.get(place)
            if own is None or not own.is_ahead_of(rank, key.stage) or ask.returned.count(place) > 1:
                raise Refused(rank, f"returns place {place}, which it does not have")
        self._latest[rank] = number
        for place in ask.returned:
            self._places.free(place)
        asked = self._asked[rank, number] = _Asked(key, size)
        if key.round <= self._round:
            self._ask(rank, number, asked)
        return self._discard() + self._given(self._places.serve())

    def written(self, rank: int, said: Written) -> list[Instruction]:
        """A rank has written a message.

        Raises:
            Refused: that is not its place, or not for this message, or the message has come before.
        """
        key = said.key
        size = self._size(rank, key, said.specs)
        if key in self._taken:
            raise Refused(rank, f"says again that the {key} is written")
        if size or said.place is not None:
            self._check_place(rank, said, size)
        self._taken.add(key)
        if said.place is not None:
            place = self._places[said.place]
            place.written = True
            if place.number is not None:
                del self._asked[rank, place.number]
        return self._take(rank, said)

    def dropped(self, rank: int, said: Dropped) -> list[Instruction]:
        """A rank will not write a message for which it has asked.

        Raises:
            Refused: it has not asked, or has written it.
        """
        if (rank, said.number) not in self._asked:
            raise Refused(rank, f"drops its message {said.number}, for which it has not asked or which ended")
        self._places.ask_no_more(rank, said.number)
        asked = self._asked.pop((rank, said.number))
        return [] if asked.place is None else self._given(self._places.release(asked.place))

    def copied(self, place: int) -> list[Instruction]:
        """A message has been copied out of its place."""
        assert self._places[place].copying
        return self._given(self._places.release(place))

    def lost(self, rank: int) -> None:
        """A rank is gone; it may still write, so its slots are nobody's any more."""
        self._places.lost(rank)
        self._asked = {which: own for which, own in self._asked.items() if which[0] != rank}
        self._early = [own for own in self._early if own[0] != rank]

    def key(self) -> Hashable:
        """All that it remembers, for those who compare states."""
        asked = tuple((which, *vars(own).values()) for which, own in sorted(self._asked.items()))
        latest = tuple(sorted(self._latest.items()))
        early = tuple((rank, said.place, said.key) for rank, said in self._early)
        taken = tuple(sorted(self._taken, key=str))
        return self._round, self._over, self._places.key(), asked, latest, taken, early

    def _size(self, rank: int, key: Key, specs: Specs) -> int:
        """Bytes on each device of the stage."""
        if key.stage not in self._homes:
            raise Refused(rank, f"sends the {key}, which is not here")
        try:
            return packed(specs, self._homes[key.stage].devices).size
        except (TypeError, ValueError) as error:
            raise Refused(rank, f"tells of arrays of the {key} that there are not: {error}") from None

    def _check_place(self, rank: int, said: Written, size: int) -> None:
        key, place = said.key, None if said.place is None else self._places.get(said.place)
        if place is None or (place.rank, place.stage) != (rank, key.stage) or place.written or not size:
            raise Refused(rank, f"says that the {key} is in place {said.place}, which it does not have")
        assert said.place is not None
        if place.number is not None and self._asked[rank, place.number].key != key:
            raise Refused(rank, f"says that the {key} is in place {said.place}, which is for another message")
        if self._places.room(said.place) < size:
            raise Refused(rank, f"says that the {key} of {size} bytes is in place {said.place}, too small")

    def _ask(self, rank: int, number: int, asked: _Asked) -> None:
        asked.state, stage = "asking", asked.key.stage
        self._places.ask(self._homes[stage].slab, Request(rank, number, stage, asked.size))

    def _given(self, gifts: list[Gift]) -> list[Instruction]:
        """Note who has got a place."""
        for gift in gifts:
            if isinstance(gift, Give) and gift.number is not None:
                asked = self._asked[gift.rank, gift.number]
                asked.state, asked.place = "placed", gift.place
        return [*gifts]

    def _take(self, rank: int, said: Written) -> list[Instruction]:
        """Copy a message of this round, keep one of a later round, drop one of a round that is over."""
        if self._is_over(said.key):
            self._taken.discard(said.key)
            return [] if said.place is None else self._given(self._places.release(said.place))
        if said.key.round > self._round:
            self._early.append((rank, said))
            return []
        slot = None
        if said.place is not None:
            place = self._places[said.place]
            place.copying, slot = True, place.slot
        slab = self._homes[said.key.stage].slab
        return [Copy(rank, said.key, said.specs, said.ended, said.place, slab, slot)]

    def _is_over(self, key: Key) -> bool:
        return key.round < self._round or (self._over and key.round == self._round)

    def _discard(self) -> list[Instruction]:
        """For rounds that are over no place is given; what has one, its sender ends itself."""
        done: list[Instruction] = []
        self._taken = {key for key in self._taken if not self._is_over(key)}
        for (rank, number), asked in self._asked.items():
            if self._is_over(asked.key) and asked.state != "unwanted":
                self._places.ask_no_more(rank, number)
                asked.state = "unwanted"
                done.append(Decline(rank, Unwanted(number)))
        return done


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
