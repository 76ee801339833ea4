"""The receiver's end: it gives places, and takes what was written. Theory of operation: `messages.py`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rrfp_jax.nixl.memory import packed
from rrfp_jax.nixl.messages import Ask, Dropped, Refused, Say, Unwanted, Written
from rrfp_jax.nixl.slots import AHEAD, Gift, Give, PlaceRequest, SlabSlots, SlotTable
from rrfp_jax.runtime.transport.protocol import Key, Rounds, Specs


class Home(NamedTuple):
    """Where a stage's messages go: a slab, and how many devices it spans."""

    slab: int
    devices: int


class Copy(NamedTuple):
    """An instruction: copy a message out of its slot, and tell `copied` when that has ended."""

    rank: int
    key: Key
    specs: Specs
    ended: float
    place: int | None  # None for a message without bytes; then nobody need be told
    slab: int
    slot: int | None


Instruction: TypeAlias = Gift | Copy | Say


@dataclass
class _Asked:
    """A message for which a place was asked, until its sender ends it.

    `early` is for a later round, without a place; `asking` waits for a place; `placed` may be written;
    `unwanted` will not be taken.
    """

    key: Key
    size: int  # bytes of a slot that it takes
    state: Literal["early", "asking", "placed", "unwanted"] = "early"
    place: int | None = None


class Receiver:
    """One process's end. Each event gives the instructions that follow from it, in order.

    Args:
        slabs: their slots, at least two each.
        homes: by stage of this process.
        ahead: places given ahead, for each sender and stage.
    """

    def __init__(self, slabs: Sequence[SlabSlots], homes: Mapping[int, Home], ahead: int = AHEAD) -> None:
        self._places, self._homes, self._rounds = SlotTable(slabs, ahead), homes, Rounds()
        self._asked: dict[tuple[int, int], _Asked] = {}  # by rank and number
        self._latest: dict[int, int] = {}  # number by rank
        self._taken: set[Key] = set()  # written in this round, or a later one

    @property
    def awaited(self) -> bool:
        """Whether a message waits for a slot."""
        return self._places.awaited

    @property
    def idle(self) -> bool:
        """Whether every request has had an answer, and everything written has been taken."""
        return not self._asked and not self._rounds.early

    def reserve(self, slab: int, size: int) -> list[Instruction]:
        """See `SlotTable.reserve`."""
        return [*self._places.reserve(slab, size)]

    def begin(self, round: int) -> list[Instruction]:
        """A round begins; of earlier ones nothing more is wanted."""
        early = self._rounds.begin(round)
        done = self._discard()
        for rank, said in early:
            done += self._take(rank, said)
        for (rank, number), asked in self._asked.items():
            if asked.key.round == round and asked.state == "early":
                self._ask(rank, number, asked)
        return done + self._given(self._places.serve())

    def reset(self) -> list[Instruction]:
        """The round is broken off."""
        self._rounds.over = True
        return self._discard() + self._given(self._places.serve())

    def asked(self, rank: int, ask: Ask) -> list[Instruction]:
        """A rank needs a place; `Refused` if it has asked before, or returns a place that is not its own."""
        number, key = ask.number, ask.key
        size = self._size(rank, key, ask.specs)
        if number <= self._latest.get(rank, 0) or not size:
            raise Refused(rank, f"asks for a place for the {key} {'again' if size else 'of no bytes'}")
        for place in ask.returned:
            own = self._places.get(place)
            ahead = own and (own.rank, own.stage, own.number, own.written) == (rank, key.stage, None, False)
            if not ahead or ask.returned.count(place) > 1:
                raise Refused(rank, f"returns place {place}, which it does not have")
        self._latest[rank] = number
        for place in ask.returned:
            self._places.free(place)
        asked = self._asked[rank, number] = _Asked(key, size)
        if key.round <= self._rounds.number:
            self._ask(rank, number, asked)
        return self._discard() + self._given(self._places.serve())

    def written(self, rank: int, said: Written) -> list[Instruction]:
        """A rank has written a message; `Refused` if it has come before, or is in a wrong place."""
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
        """A rank will not write a message; `Refused` if it has not asked for a place, or has written it."""
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
        """A rank is gone; it may still write, so its slots are given to nobody."""
        self._places.lost(rank)
        self._asked = {which: own for which, own in self._asked.items() if which[0] != rank}
        self._rounds.early = [own for own in self._rounds.early if own[0] != rank]

    def key(self) -> Hashable:
        """All that the receiver remembers, to compare states."""
        asked = tuple((which, *vars(own).values()) for which, own in sorted(self._asked.items()))
        latest = tuple(sorted(self._latest.items()))
        early = tuple((rank, said.place, said.key) for rank, said in self._rounds.early)
        taken = tuple(sorted(self._taken, key=str))
        return self._rounds.number, self._rounds.over, self._places.key(), asked, latest, taken, early

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
        self._places.ask(self._homes[stage].slab, PlaceRequest(rank, number, stage, asked.size))

    def _given(self, gifts: list[Gift]) -> list[Instruction]:
        """Note who has got a place."""
        for gift in gifts:
            if isinstance(gift, Give) and gift.number is not None:
                asked = self._asked[gift.rank, gift.number]
                asked.state, asked.place = "placed", gift.place
        return [*gifts]

    def _take(self, rank: int, said: Written) -> list[Instruction]:
        """Copy a message of this round, keep one of a later round, drop one of a round that is over."""
        if self._rounds.is_over(said.key):
            self._taken.discard(said.key)
            return [] if said.place is None else self._given(self._places.release(said.place))
        if not self._rounds.takes(said.key, (rank, said)):
            return []
        slot = None
        if said.place is not None:
            place = self._places[said.place]
            place.copying, slot = True, place.slot
        slab = self._homes[said.key.stage].slab
        return [Copy(rank, said.key, said.specs, said.ended, said.place, slab, slot)]

    def _discard(self) -> list[Instruction]:
        """For rounds that are over no place is given; what has one, its sender ends itself."""
        done: list[Instruction] = []
        self._taken = {key for key in self._taken if not self._rounds.is_over(key)}
        for (rank, number), asked in self._asked.items():
            if self._rounds.is_over(asked.key) and asked.state != "unwanted":
                self._places.ask_no_more(rank, number)
                asked.state = "unwanted"
                done.append(Say(rank, Unwanted(number)))
        return done
