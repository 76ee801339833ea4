"""The receiver's end: it gives places, and takes what was written. Theory of operation: `messages.py`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rrfp_jax.runtime.transport.nixl.messages import Dropped, Offer, Refused, Specs, Unwanted, Written
from rrfp_jax.runtime.transport.nixl.packing import packed
from rrfp_jax.runtime.transport.nixl.places import AHEAD, Gift, Give, Places, Request
from rrfp_jax.runtime.transport.nixl.slots import Slots
from rrfp_jax.runtime.transport.protocol import Key


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
    """Tell a rank that its offer is unwanted."""

    rank: int
    message: Unwanted


Instruction: TypeAlias = Gift | Copy | Decline


@dataclass
class _Incoming:
    """An offer that has not ended.

    Attributes:
        size: bytes of a slot that it takes.
        state: `early`: for a later round, without a place; `asking`: for a place; `placed`: may be written;
            `written`: in a later round; `unwanted`: until its sender ends it.
    """

    key: Key
    specs: Specs
    size: int
    state: Literal["early", "asking", "placed", "written", "unwanted"] = "placed"
    place: int | None = None
    ended: float = 0.0


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
        self._incoming: dict[tuple[int, int], _Incoming] = {}  # by rank and number
        self._latest: dict[int, int] = {}  # number by rank

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a slot."""
        return self._places.awaited

    @property
    def idle(self) -> bool:
        """Whether every offer has ended."""
        return not self._incoming

    def begin(self, round: int) -> list[Instruction]:
        """A round begins; of earlier ones nothing more is wanted."""
        self._round, self._over = round, False
        done = self._discard()
        for (rank, number), incoming in list(self._incoming.items()):
            if incoming.key.round == round and incoming.state == "early":
                self._ask(rank, number, incoming)
            elif incoming.key.round == round and incoming.state == "written":
                done.append(self._copy(rank, number, incoming))
        return done + self._given(self._places.serve())

    def reset(self) -> list[Instruction]:
        """The round is broken off."""
        self._over = True
        return self._discard() + self._given(self._places.serve())

    def offered(self, rank: int, offer: Offer) -> list[Instruction]:
        """A rank has an input for a stage of this process.

        Raises:
            Refused: it was offered before, for another process, or names a place that is not this rank's.
        """
        self._check(rank, offer)
        number, key = offer.number, offer.key
        size = packed(offer.specs, self._homes[key.stage].devices).size
        if offer.place is not None and self._places.room(offer.place) < size:
            raise Refused(rank, f"wants to write {size} bytes of the {key} to place {offer.place}, too small")
        self._latest[rank] = number
        for place in offer.returned:
            self._places.free(place)
        incoming = _Incoming(key, offer.specs, size, place=offer.place)
        self._incoming[rank, number] = incoming
        if offer.place is not None:
            self._places[offer.place].number = number
        elif size and key.round > self._round:
            incoming.state = "early"
        elif size:
            self._ask(rank, number, incoming)
        return self._discard() + self._given(self._places.serve())

    def written(self, rank: int, said: Written) -> list[Instruction]:
        """A rank has written a message.

        Raises:
            Refused: it was never offered, has no place, or has been written.
        """
        incoming = self._known(rank, said.number)
        if incoming.size and incoming.place is None:
            raise Refused(rank, f"says that the {incoming.key} is written, which has no place")
        if incoming.state == "written":
            raise Refused(rank, f"says again that the {incoming.key} is written")
        if incoming.state == "unwanted":
            return self._end(rank, said.number)
        incoming.ended = said.ended
        if incoming.key.round == self._round:
            return [self._copy(rank, said.number, incoming)]
        incoming.state = "written"
        return []

    def dropped(self, rank: int, said: Dropped) -> list[Instruction]:
        """A rank will not write a message.

        Raises:
            Refused: it was never offered, or has been written.
        """
        incoming = self._known(rank, said.number)
        if incoming.state == "written":
            raise Refused(rank, f"drops the {incoming.key}, which it has written")
        return self._end(rank, said.number)

    def copied(self, place: int) -> list[Instruction]:
        """A message has been copied out of its place."""
        assert self._places[place].copying
        return self._given(self._places.release(place))

    def lost(self, rank: int) -> None:
        """A rank is gone; it may still write, so its slots are nobody's any more."""
        self._places.lost(rank)
        self._incoming = {which: own for which, own in self._incoming.items() if which[0] != rank}

    def key(self) -> Hashable:
        """All that it remembers, for those who compare states."""
        incoming = tuple((which, *vars(own).values()) for which, own in sorted(self._incoming.items()))
        latest = tuple(sorted(self._latest.items()))
        return self._round, self._over, self._places.key(), incoming, latest

    def _check(self, rank: int, offer: Offer) -> None:
        key = offer.key
        if key.stage not in self._homes:
            raise Refused(rank, f"offers the {key}, which is not here")
        known = [own for own in self._incoming.values() if own.key == key and own.state != "unwanted"]
        if known or offer.number <= self._latest.get(rank, 0):
            raise Refused(rank, f"offers the {key} again")
        named = [*offer.returned, *([] if offer.place is None else [offer.place])]
        for number in named:
            place = self._places.get(number)
            own = place is not None and (place.rank, place.stage, place.number) == (rank, key.stage, None)
            if not own or named.count(number) > 1:
                raise Refused(rank, f"offers the {key} and names place {number}, which it does not have")

    def _known(self, rank: int, number: int) -> _Incoming:
        if (rank, number) not in self._incoming:
            raise Refused(rank, f"speaks of its message {number}, which it has not offered or has ended")
        return self._incoming[rank, number]

    def _ask(self, rank: int, number: int, incoming: _Incoming) -> None:
        incoming.state, stage = "asking", incoming.key.stage
        self._places.ask(self._homes[stage].slab, Request(rank, number, stage, incoming.size))

    def _given(self, gifts: list[Gift]) -> list[Instruction]:
        """Note who has got a place."""
        for gift in gifts:
            if isinstance(gift, Give) and gift.number is not None:
                incoming = self._incoming[gift.rank, gift.number]
                incoming.state, incoming.place = "placed", gift.place
        return [*gifts]

    def _copy(self, rank: int, number: int, incoming: _Incoming) -> Copy:
        del self._incoming[rank, number]
        slot = None
        if incoming.place is not None:
            place = self._places[incoming.place]
            place.copying, slot = True, place.slot
        slab = self._homes[incoming.key.stage].slab
        return Copy(rank, incoming.key, incoming.specs, incoming.ended, incoming.place, slab, slot)

    def _discard(self) -> list[Instruction]:
        """Nothing of rounds that are over is wanted; what is not written yet, its sender ends itself."""
        done: list[Instruction] = []
        for (rank, number), incoming in list(self._incoming.items()):
            over = incoming.key.round < self._round or (self._over and incoming.key.round == self._round)
            if over and incoming.state == "written":
                done += self._end(rank, number)
            elif over and incoming.state != "unwanted":
                self._places.ask_no_more(rank, number)
                incoming.state = "unwanted"
                done.append(Decline(rank, Unwanted(number)))
        return done

    def _end(self, rank: int, number: int) -> list[Instruction]:
        """A message is ended by its sender."""
        incoming = self._incoming.pop((rank, number))
        self._places.ask_no_more(rank, number)
        return [] if incoming.place is None else self._given(self._places.release(incoming.place))
