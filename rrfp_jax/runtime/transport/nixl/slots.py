"""Who has a place in which slot, who waits for one, and which slots go back to their senders ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeAlias

import jax

from rrfp_jax.runtime.transport.nixl.copies import (
    ALIGNMENT,
    Copiers,
    OneArrayCompiler,
    by_jit,
    cuts_of,
    packed,
)
from rrfp_jax.runtime.transport.protocol import Devices, Specs


class Slots:
    """Slots are numbered; each may grow while it is free.

    Args:
        sizes: of each slot at the beginning, in bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._free = list(range(len(sizes)))

    @property
    def free(self) -> Sequence[int]:
        """Those that nobody has, by number."""
        return self._free

    def suited(self, size: int) -> int:
        """The smallest free slot that holds so many bytes, else the largest free one; some must be free."""
        large = [slot for slot in self._free if self.sizes[slot] >= size]
        return min(large or self._free, key=lambda slot: self.sizes[slot] if large else -self.sizes[slot])

    def take(self, slot: int, size: int = 0) -> bool:
        """Take a free slot; whether it must grow, to so many bytes."""
        self._free.remove(slot)
        grows = self.sizes[slot] < size
        self.sizes[slot] = max(self.sizes[slot], size)
        return grows

    def give_back(self, slot: int) -> None:
        """Nobody writes to it or reads from it any more."""
        self._free.append(slot)
        self._free.sort()


AHEAD = 2
"""Places that a sender has for a stage before it needs them: one is written while the other is copied out."""

SLOTS = 2 * AHEAD + 1
"""Of a slab: a stage has two neighbours, and one slot is never given ahead."""

MOST_ARRAYS = 16
"""Of a message, such that each may begin at a multiple of what devices align to."""

LEAST_ROOM = 2**12
"""Bytes of a slot for messages of which nothing is known."""


def room_for(largest: int) -> int:
    """Bytes of a slot, on each device, for messages of so many."""
    return max(largest, LEAST_ROOM) + MOST_ARRAYS * ALIGNMENT


class Grow(NamedTuple):
    """Give a slot so many bytes; nobody uses it."""

    slab: int
    slot: int
    room: int


class Give(NamedTuple):
    """Tell a rank of its place, of so many bytes on each device.

    Attributes:
        number: of the message that asked for it, None if it is given ahead.
    """

    rank: int
    place: int
    stage: int
    number: int | None
    slab: int
    slot: int
    room: int


Gift: TypeAlias = Grow | Give


@dataclass
class Place:
    """A place that somebody has.

    Attributes:
        number: of the message that asked for it; None if it was given ahead.
        written: whether its sender has said so.
        copying: whether what was written is being copied out.
    """

    rank: int
    stage: int
    slab: int
    slot: int
    number: int | None
    written: bool = False
    copying: bool = False

    def is_ahead_of(self, rank: int, stage: int) -> bool:
        """Whether this rank has it for this stage, without having asked, and has not used it."""
        return (self.rank, self.stage, self.number, self.written) == (rank, stage, None, False)


class Request(NamedTuple):
    """A message that waits for a place."""

    rank: int
    number: int
    stage: int
    size: int


@dataclass
class _Slab:
    slots: Slots
    ahead: int = 0  # how many slots were given ahead and are not free again
    queue: deque[Request] = field(default_factory=deque)  # who asked first


class Places:
    """All places in a process's slabs.

    Args:
        slabs: their slots, at least two each.
        ahead: places given ahead, for each sender and stage.
    """

    def __init__(self, slabs: Sequence[Slots], ahead: int) -> None:
        self._slabs, self._ahead = [_Slab(slots) for slots in slabs], ahead
        self._all: dict[int, Place] = {}
        self._given = 0  # how many, ever
        self._edges: dict[tuple[int, int], int] = {}  # by rank and stage, places given ahead and not free
        self._lost: set[int] = set()

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a slot."""
        return any(slab.queue for slab in self._slabs)

    def __getitem__(self, number: int) -> Place:
        return self._all[number]

    def get(self, number: int) -> Place | None:
        """A place, if somebody has it."""
        return self._all.get(number)

    def room(self, number: int) -> int:
        """Bytes of a place, on each device."""
        place = self._all[number]
        return self._slabs[place.slab].slots.sizes[place.slot]

    def ask(self, slab: int, request: Request) -> None:
        """Let a message wait for a slot of a slab."""
        self._slabs[slab].queue.append(request)

    def ask_no_more(self, rank: int, number: int) -> None:
        """A message waits no more."""
        self._keep(lambda request: (request.rank, request.number) != (rank, number))

    def serve(self) -> list[Gift]:
        """Give free slots to those who wait, in the order in which they asked."""
        done: list[Gift] = []
        for index, slab in enumerate(self._slabs):
            while slab.queue and slab.slots.free:
                rank, number, stage, size = slab.queue.popleft()
                slot = slab.slots.suited(size)
                if slab.slots.take(slot, size):
                    done.append(Grow(index, slot, size))
                done.append(self._give(rank, stage, index, slot, number))
        return done

    def free(self, number: int) -> Place:
        """A place is used up, or was given back unused. A lost rank may still write to its slot."""
        place = self._all.pop(number)
        if place.rank not in self._lost:
            slab = self._slabs[place.slab]
            slab.slots.give_back(place.slot)
            if place.number is None:
                slab.ahead -= 1
                self._edges[place.rank, place.stage] -= 1
        return place

    def release(self, number: int) -> list[Gift]:
        """Free a place, serve who waits, else let its sender have the slot ahead."""
        place = self.free(number)
        done = self.serve()
        slab, edge = self._slabs[place.slab], (place.rank, place.stage)
        has = self._edges.get(edge, 0)
        if place.slot in slab.slots.free and has < self._ahead and slab.ahead < len(slab.slots.sizes) - 1:
            slab.slots.take(place.slot)
            slab.ahead, self._edges[edge] = slab.ahead + 1, has + 1
            done.append(self._give(*edge, place.slab, place.slot, None))
        return done

    def lost(self, rank: int) -> None:
        """A rank is gone: what it could write to is nobody's any more."""
        self._lost.add(rank)
        self._keep(lambda request: request.rank != rank)
        self._all = {n: place for n, place in self._all.items() if place.rank != rank or place.copying}

    def key(self) -> Hashable:
        """All that it remembers, for those who compare states."""
        return (
            (self._given, tuple(sorted(self._lost)), tuple(sorted(self._edges.items()))),
            tuple((number, *vars(own).values()) for number, own in sorted(self._all.items())),
            tuple((tuple(s.slots.sizes), tuple(s.slots.free), s.ahead, tuple(s.queue)) for s in self._slabs),
        )

    def _keep(self, wanted: Callable[[Request], bool]) -> None:
        for slab in self._slabs:
            slab.queue = deque(filter(wanted, slab.queue))

    def _give(self, rank: int, stage: int, slab: int, slot: int, number: int | None) -> Give:
        self._given += 1
        self._all[self._given] = Place(rank, stage, slab, slot, number)
        return Give(rank, self._given, stage, number, slab, slot, self._slabs[slab].slots.sizes[slot])


Group = tuple[jax.Device, ...]
"""Devices of this process which one or several of its stages are on; one slab is theirs."""


@dataclass(frozen=True)
class Foreseen:
    """What is known of the messages to this process before there are any.

    Attributes:
        messages: by stage, shape and dtype of each array of those that there may be.
        room: by stage, bytes of the largest message on each device, where only that is known.
        compiler: makes the programs that copy them out of slots.
    """

    messages: Mapping[int, Collection[Specs]] = field(default_factory=dict)
    room: Mapping[int, int] = field(default_factory=dict)
    compiler: OneArrayCompiler = by_jit

    def slot_size(self, devices: Devices, group: Group) -> int:
        """Bytes of each slot of these devices at the beginning, for the stages that are on them."""
        own = [stage for stage in devices if (*devices[stage],) == group]
        known = [packed(specs, len(group)).size for stage in own for specs in self.messages.get(stage, ())]
        return max(known) if any(known) else max(room_for(self.room.get(stage, 0)) for stage in own)


def groups_of(devices: Devices) -> Sequence[Group]:
    """The devices of each slab, given those of each stage."""
    return list(dict.fromkeys((*own,) for own in devices.values()))


def prepare(copiers: Copiers, group: Group, sizes: Iterable[int], messages: Iterable[Specs]) -> None:
    """Compile what copies these messages out of slots of these sizes, and of those that grow for one of them.

    Args:
        copiers: compile, each program once.
        group: whose slots.
        sizes: of their arrays, in bytes.
        messages: to stages that are there.
    """
    sizes = set(sizes)
    needs = {specs: packed(specs, len(group)).size + ALIGNMENT for specs in messages}
    grown = {need for need in needs.values() if need > min(sizes)}
    for (specs, need), size in product(needs.items(), sizes | grown):
        if ALIGNMENT < need <= size:  # one without bytes takes no slot
            for device, (_, cuts) in zip(group, cuts_of(specs, len(group)), strict=True):
                copiers.of(device, size, cuts)


def compile_copiers(devices: Devices, first: Foreseen, later: Mapping[int, Collection[Specs]]) -> None:
    """Compile what a start with these messages would, and what comes later in the run; without any slots.

    Args:
        devices: by stage, those of one process; they may be absent.
        first: what is foreseen at the start.
        later: messages by stage.
    """
    copiers = Copiers(first.compiler)
    for group in groups_of(devices):
        own = [stage for stage in devices if (*devices[stage],) == group]
        messages = [specs for of in (first.messages, later) for stage in own for specs in of.get(stage, ())]
        prepare(copiers, group, {first.slot_size(devices, group) + ALIGNMENT}, messages)


def slot_bytes(size: int) -> int:
    """What the slots of this size take of a device's memory."""
    return SLOTS * (size + ALIGNMENT)
