"""Who has a place in which slot, who waits for one, and which slots go back to their senders ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

AHEAD = 2
"""Places that a sender has for a stage before it needs them: one is written while the other is copied out."""

SLOTS = 2 * AHEAD + 1
"""Slots of a slab: a stage has two neighbours, and one slot is never given ahead."""


class SlabSlots:
    """The slots of a slab, by number, with their sizes in bytes; each may grow while it is free."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.free = list(range(len(sizes)))

    def suited(self, size: int) -> int:
        """The smallest free slot that holds so many bytes, else the largest free one; some must be free."""
        large = [slot for slot in self.free if self.sizes[slot] >= size]
        return min(large or self.free, key=lambda slot: self.sizes[slot] if large else -self.sizes[slot])

    def take(self, slot: int, size: int = 0) -> bool:
        """Take a free slot; whether it must grow, to so many bytes."""
        self.free.remove(slot)
        grows = self.sizes[slot] < size
        self.sizes[slot] = max(self.sizes[slot], size)
        return grows

    def give_back(self, slot: int) -> None:
        """Nobody writes to the slot or reads from it any more."""
        self.free.append(slot)
        self.free.sort()


class Grow(NamedTuple):
    """An instruction: give a slot, which nobody uses, so many bytes."""

    slab: int
    slot: int
    room: int


class Give(NamedTuple):
    """An instruction: tell a rank of its place, of so many bytes on each device."""

    rank: int
    place: int
    stage: int
    number: int | None  # of the message that asked for it; None if it is given ahead
    slab: int
    slot: int
    room: int


Gift: TypeAlias = Grow | Give


@dataclass
class HeldPlace:
    """A place that a rank has."""

    rank: int
    stage: int
    slab: int
    slot: int
    number: int | None  # of the message that asked for it; None if it was given ahead
    written: bool = False
    copying: bool = False


class PlaceRequest(NamedTuple):
    """A message that waits for a place."""

    rank: int
    number: int
    stage: int
    size: int


@dataclass
class _Slab:
    slots: SlabSlots
    ahead: int = 0  # how many slots were given ahead and are not free again
    queue: deque[PlaceRequest] = field(default_factory=deque)  # who asked first


class SlotTable:
    """All places in a process's slabs of at least two slots each; `ahead` for each sender and stage."""

    def __init__(self, slabs: Sequence[SlabSlots], ahead: int) -> None:
        self._slabs, self._ahead = [_Slab(slots) for slots in slabs], ahead
        self._all: dict[int, HeldPlace] = {}
        self._given = 0  # how many, ever
        self._edges: dict[tuple[int, int], int] = {}  # by rank and stage, places given ahead and not free
        self._lost: set[int] = set()

    @property
    def awaited(self) -> bool:
        """Whether a message waits for a slot."""
        return any(slab.queue for slab in self._slabs)

    def __getitem__(self, number: int) -> HeldPlace:
        return self._all[number]

    def get(self, number: int) -> HeldPlace | None:
        """A place, if a rank has it."""
        return self._all.get(number)

    def room(self, number: int) -> int:
        """Bytes of a place, on each device."""
        place = self._all[number]
        return self._slabs[place.slab].slots.sizes[place.slot]

    def reserve(self, slab: int, size: int) -> list[Gift]:
        """Give every slot of a slab that has no bytes yet so many."""
        slots = self._slabs[slab].slots
        new = [slot for slot in slots.free if not slots.sizes[slot]]
        for slot in new:
            slots.sizes[slot] = size
        return [Grow(slab, slot, size) for slot in new]

    def ask(self, slab: int, request: PlaceRequest) -> None:
        """Let a message wait for a slot of a slab."""
        self._slabs[slab].queue.append(request)

    def ask_no_more(self, rank: int, number: int) -> None:
        """A message waits no more."""
        self._keep(lambda request: (request.rank, request.number) != (rank, number))

    def serve(self) -> list[Gift]:
        """Give free slots to the messages that wait, in the order in which they asked."""
        done: list[Gift] = []
        for index, slab in enumerate(self._slabs):
            while slab.queue and slab.slots.free:
                rank, number, stage, size = slab.queue.popleft()
                slot = slab.slots.suited(size)
                if slab.slots.take(slot, size):
                    done.append(Grow(index, slot, size))
                done.append(self._give(rank, stage, index, slot, number))
        return done

    def free(self, number: int) -> HeldPlace:
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
        """A rank is gone: the slots that it could write to are given to nobody."""
        self._lost.add(rank)
        self._keep(lambda request: request.rank != rank)
        self._all = {n: place for n, place in self._all.items() if place.rank != rank or place.copying}

    def key(self) -> Hashable:
        """All that the table remembers, to compare states."""
        return (
            (self._given, tuple(sorted(self._lost)), tuple(sorted(self._edges.items()))),
            tuple((number, *vars(own).values()) for number, own in sorted(self._all.items())),
            tuple((tuple(s.slots.sizes), tuple(s.slots.free), s.ahead, tuple(s.queue)) for s in self._slabs),
        )

    def _keep(self, wanted: Callable[[PlaceRequest], bool]) -> None:
        for slab in self._slabs:
            slab.queue = deque(filter(wanted, slab.queue))

    def _give(self, rank: int, stage: int, slab: int, slot: int, number: int | None) -> Give:
        self._given += 1
        self._all[self._given] = HeldPlace(rank, stage, slab, slot, number)
        return Give(rank, self._given, stage, number, slab, slot, self._slabs[slab].slots.sizes[slot])
