"""The receiver's end: it gives places in its slots, and takes what was written.

`sender.py` says how the two ends work together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rrfp_jax.nixl.memory import packed
from rrfp_jax.nixl.sender import Ask, Dropped, Refused, Say, Unwanted, Written
from rrfp_jax.runtime.transport.protocol import Key, Rounds, Specs

AHEAD = 2
"""Places that a sender has for a stage before it needs them: one is written while the other is copied out."""

SLOTS = 2 * AHEAD + 1
"""Slots of a slab: a stage has two neighbours, and one slot is never given ahead."""


class Slab(NamedTuple):
    """The slots of some devices, at least two: how many bytes each has on each device."""

    sizes: list[int]
    devices: int


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


class Copy(NamedTuple):
    """An instruction: copy a message out of its slot, and tell `release` when that has ended."""

    rank: int
    key: Key
    specs: Specs
    ended: float
    place: int | None  # None for a message without bytes; then nobody need be told
    slab: int
    slot: int | None


Instruction: TypeAlias = Grow | Give | Copy | Say


@dataclass
class _Asked:
    """A message for which a place was asked, until its sender ends it."""

    key: Key
    size: int  # bytes of a slot that it takes
    place: int | None = None
    unwanted: bool = False  # and its sender knows


class Receiver:
    """One process's end. Each event gives the instructions that follow from it, in order.

    `stages` says in which slab the messages to each stage go, `ahead` how many places a sender of one has.
    """

    def __init__(self, slabs: Sequence[Slab], stages: Mapping[int, int], ahead: int = AHEAD) -> None:
        self._slabs, self._stages, self._ahead, self._rounds = slabs, stages, ahead, Rounds()
        self._asked: dict[tuple[int, int], _Asked] = {}  # by rank and number, in the order of asking
        self._latest: dict[int, int] = {}  # number by rank
        self._places: dict[int, Give] = {}  # that ranks have; nobody else has their slots
        self._given = 0  # places, ever
        self._written: set[int] = set()  # places
        self._taken: set[Key] = set()  # written in this round, or a later one
        self._lost: set[int] = set()

    @property
    def awaited(self) -> bool:
        """Whether a message waits for a slot."""
        return any(map(self._waits, self._asked.values()))

    def reserve(self, slab: int, size: int) -> list[Instruction]:
        """Give every slot of a slab that has no bytes yet so many."""
        sizes = self._slabs[slab].sizes
        return [self._grown(slab, slot, size) for slot in self._free(slab) if not sizes[slot]]

    def begin(self, round: int) -> list[Instruction]:
        """A round begins; of earlier ones nothing more is wanted."""
        early = self._rounds.begin(round)
        done = self._discard()
        for rank, said in early:
            done += self._take(rank, said)
        return done + self._serve()

    def reset(self) -> list[Instruction]:
        """The round is broken off."""
        self._rounds.over = True
        return self._discard()

    def asked(self, rank: int, ask: Ask) -> list[Instruction]:
        """A rank needs a place; `Refused` if it has asked before, or returns a place that is not its own."""
        number, key, returned = ask.number, ask.key, ask.returned
        size = self._size(rank, key, ask.specs)
        if number <= self._latest.get(rank, 0) or not size:
            raise Refused(rank, f"asks for a place for the {key} {'again' if size else 'of no bytes'}")
        for place in returned:
            own = self._places.get(place)
            ahead = own is not None and (own.rank, own.stage, own.number) == (rank, key.stage, None)
            if not ahead or place in self._written or returned.count(place) > 1:
                raise Refused(rank, f"returns place {place}, which it does not have")
        for place in returned:
            del self._places[place]
        self._latest[rank], self._asked[rank, number] = number, _Asked(key, size)
        return self._discard() + self._serve()

    def written(self, rank: int, said: Written) -> list[Instruction]:
        """A rank has written a message; `Refused` if it has come before, or is in a wrong place."""
        size = self._size(rank, said.key, said.specs)
        if said.key in self._taken:
            raise Refused(rank, f"says again that the {said.key} is written")
        if size or said.place is not None:
            self._check_place(rank, said, size)
        self._taken.add(said.key)
        if said.place is not None:
            self._written.add(said.place)
            if (number := self._places[said.place].number) is not None:
                del self._asked[rank, number]
        return self._take(rank, said)

    def dropped(self, rank: int, said: Dropped) -> list[Instruction]:
        """A rank will not write a message; `Refused` if it has not asked for a place, or has written it."""
        if (asked := self._asked.pop((rank, said.number), None)) is None:
            raise Refused(rank, f"drops its message {said.number}, for which it has not asked or which ended")
        return [] if asked.place is None else self.release(asked.place)

    def release(self, place: int) -> list[Instruction]:
        """A place's message has been copied out, or is not taken: serve who waits, else give it ahead."""
        own = self._places[place]
        if own.rank in self._lost:  # who may still write there
            return []
        del self._places[place]
        self._written.discard(place)
        done = self._serve()
        ahead = [each for each in self._places.values() if each.slab == own.slab and each.number is None]
        edge = [each for each in ahead if (each.rank, each.stage) == (own.rank, own.stage)]
        some_left = len(ahead) < len(self._slabs[own.slab].sizes) - 1
        if own.slot in self._free(own.slab) and len(edge) < self._ahead and some_left:
            done.append(self._give(own.rank, own.stage, own.slot, None))
        return done

    def lost(self, rank: int) -> None:
        """A rank is gone; it may still write, so its slots are given to nobody."""
        self._lost.add(rank)
        self._asked = {which: own for which, own in self._asked.items() if which[0] != rank}
        self._rounds.early = [own for own in self._rounds.early if own[0] != rank]

    def _size(self, rank: int, key: Key, specs: Specs) -> int:
        """Bytes on each device of the stage."""
        if key.stage not in self._stages:
            raise Refused(rank, f"sends the {key}, which is not here")
        try:
            return packed(specs, self._slabs[self._stages[key.stage]].devices).size
        except (TypeError, ValueError) as error:
            raise Refused(rank, f"tells of arrays of the {key} that there are not: {error}") from None

    def _check_place(self, rank: int, said: Written, size: int) -> None:
        named = f"says that the {said.key}"
        own = None if said.place is None else self._places.get(said.place)
        mine = own is not None and (own.rank, own.stage) == (rank, said.key.stage)
        if own is None or not mine or own.place in self._written or not size:
            raise Refused(rank, f"{named} is in place {said.place}, which it does not have")
        if own.number is not None and self._asked[rank, own.number].key != said.key:
            raise Refused(rank, f"{named} is in place {said.place}, which is for another message")
        if own.room < size:
            raise Refused(rank, f"{named} of {size} bytes is in place {said.place}, too small")

    def _take(self, rank: int, said: Written) -> list[Instruction]:
        """Copy a message of this round, keep one of a later round, drop one of a round that is over."""
        if self._rounds.is_over(said.key):
            self._taken.discard(said.key)
            return [] if said.place is None else self.release(said.place)
        if not self._rounds.takes(said.key, (rank, said)):
            return []
        slot = None if said.place is None else self._places[said.place].slot
        return [Copy(rank, said.key, said.specs, said.ended, said.place, self._stages[said.key.stage], slot)]

    def _discard(self) -> list[Instruction]:
        """For rounds that are over no place is given; what has one, its sender ends itself."""
        done: list[Instruction] = []
        self._taken = {key for key in self._taken if not self._rounds.is_over(key)}
        for (rank, number), asked in self._asked.items():
            if self._rounds.is_over(asked.key) and not asked.unwanted:
                asked.unwanted = True
                done.append(Say(rank, Unwanted(number)))
        return done

    def _waits(self, asked: _Asked) -> bool:
        """Whether a message waits for a place; one of a later round does not yet."""
        return asked.place is None and not asked.unwanted and asked.key.round <= self._rounds.number

    def _serve(self) -> list[Instruction]:
        """Give free slots to the messages that wait, in the order in which they asked."""
        done: list[Instruction] = []
        for (rank, number), asked in self._asked.items():
            slab = self._stages[asked.key.stage]
            if self._waits(asked) and (free := self._free(slab)):
                sizes = self._slabs[slab].sizes
                large = [each for each in free if sizes[each] >= asked.size]
                slot = min(large, key=sizes.__getitem__) if large else max(free, key=sizes.__getitem__)
                if sizes[slot] < asked.size:
                    done.append(self._grown(slab, slot, asked.size))
                given = self._give(rank, asked.key.stage, slot, number)
                asked.place = given.place
                done.append(given)
        return done

    def _free(self, slab: int) -> list[int]:
        """The slots that nobody writes to or reads from."""
        used = {own.slot for own in self._places.values() if own.slab == slab}
        return [slot for slot in range(len(self._slabs[slab].sizes)) if slot not in used]

    def _grown(self, slab: int, slot: int, size: int) -> Grow:
        self._slabs[slab].sizes[slot] = size
        return Grow(slab, slot, size)

    def _give(self, rank: int, stage: int, slot: int, number: int | None) -> Give:
        self._given, slab = self._given + 1, self._stages[stage]
        room = self._slabs[slab].sizes[slot]
        self._places[self._given] = given = Give(rank, self._given, stage, number, slab, slot, room)
        return given
