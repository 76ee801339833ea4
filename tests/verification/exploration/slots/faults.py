"""Faults put into the machines on purpose, each of which the exploration must find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rrfp_jax.nixl.receiver import Copy, Grow, Receiver
from rrfp_jax.nixl.sender import Granted, Say, Sender, Written
from tests.verification.exploration.slots.world import Case, Makers


@dataclass(frozen=True)
class Fault:
    """What is wrong, a case in which it shows, machines that have it, and what must be said of it."""

    name: str
    case: Case
    makers: Makers
    said: str


class SaysSoAtOnce(Sender):
    """Says that a message is written when the write begins."""

    def _write(self, number: int, outgoing: Any) -> Any:
        done = super()._write(number, outgoing)
        if not done:
            return []
        said = Written(outgoing.place.place, outgoing.key, outgoing.specs, 0.0)
        return [*done, Say(outgoing.rank, said)]

    def complete(self, number: int) -> Any:
        """Without a word."""
        self._outgoing.pop(number, None)
        return []


class WritesAhead(Sender):
    """Writes as soon as it has a place, whether or not anything is there."""

    def granted(self, rank: int, granted: Granted) -> Any:
        """As it should, and writes."""
        done = super().granted(rank, granted)
        outgoing = self._outgoing.get(granted.number or 0)
        return done or (self._write(granted.number or 0, outgoing) if outgoing is not None else [])


class KeepsPlaces(Sender):
    """Uses the place of a message that it has dropped for another one."""

    def _drop(self, number: int) -> Any:
        outgoing = self._outgoing[number]
        if outgoing.asked and outgoing.place is not None:
            self._ahead.setdefault((outgoing.rank, outgoing.key.stage), []).append(outgoing.place)
        return super()._drop(number)


class DropsAll(Sender):
    """A round broken off takes with it what others still need of earlier ones."""

    def reset(self, round: int) -> Any:
        """Whatever the round."""
        return super().reset(0)


class WritesToTheLost(Sender):
    """Goes on writing to who is gone."""

    def lost(self, rank: int) -> Any:
        """Begins what has a place."""
        waiting = [(n, own) for n, own in self._outgoing.items() if own.place and own.state == "offered"]
        return [done for number, own in waiting for done in self._write(number, own)]


class FreesEarly(Receiver):
    """A slot is free when a message is written, not when it has been copied out."""

    def written(self, rank: int, said: Written) -> Any:
        """And releases the place."""
        done = super().written(rank, said)
        copies = [one.place for one in done if isinstance(one, Copy) and one.place is not None]
        return [*done, *(gift for place in copies for gift in super(FreesEarly, self).release(place))]

    def release(self, place: int) -> Any:
        """Which is too late for what has been copied out."""
        return super().release(place) if place in self._places else []


class ForgetsAsks(Receiver):
    """Takes back the slots of a round that is broken off, from those who may be writing to them."""

    def _discard(self) -> Any:
        done = super()._discard()
        for asked in self._asked.values():
            if asked.unwanted and asked.place is not None:
                del self._places[asked.place]
                asked.place = None
        return done


class IsSilent(Receiver):
    """Tells nobody that a message is unwanted."""

    def _discard(self) -> Any:
        return [one for one in super()._discard() if not isinstance(one, Say)]


class TakesAnyRound(Receiver):
    """Gives a place to what nobody can take yet, while others need it."""

    def _waits(self, asked: Any) -> bool:
        return asked.place is None and not asked.unwanted


class TakesEarly(Receiver):
    """Copies what is for a later round."""

    def _take(self, rank: int, said: Written) -> Any:
        round, self._rounds.number = self._rounds.number, max(self._rounds.number, said.key.round)
        done = super()._take(rank, said)
        self._rounds.number = round
        return done


class TakesWhatIsNowhere(Receiver):
    """Believes that a message is written, although it has no place."""

    def _check_place(self, rank: int, said: Written, size: int) -> None:
        if said.place is not None:
            super()._check_place(rank, said, size)


class GivesAll(Receiver):
    """Keeps no slot for those who ask."""

    def release(self, place: int) -> Any:
        """As if there were one more."""
        sizes = self._slabs[0].sizes
        sizes.append(0)
        try:
            return super().release(place)
        finally:
            sizes.pop()

    def _free(self, slab: int) -> list[int]:
        return [slot for slot in super()._free(slab) if self._slabs[slab].sizes[slot]]


class GivesTheLost(Receiver):
    """The slots of who is gone go to others."""

    def lost(self, rank: int) -> None:
        """Frees them first."""
        gone = [own.place for own in self._places.values() if own.rank == rank]
        for place in gone:
            if place not in self._written:
                del self._places[place]
        super().lost(rank)


class AnyonesPlaces(Receiver):
    """Everybody has every place."""

    def _check_place(self, rank: int, said: Written, size: int) -> None:
        own = self._places.get(said.place or 0)
        if own is None or own.place in self._written or not size or own.room < size:
            super()._check_place(rank, said, size)


class NeverGrows(Receiver):
    """Takes a slot that is too small."""

    def _serve(self) -> Any:
        before = [*self._slabs[0].sizes]
        done = super()._serve()
        self._slabs[0].sizes[:] = before
        grown = {one.slot for one in done if isinstance(one, Grow)}
        kept: list[Any] = [one for one in done if not isinstance(one, Grow)]
        return [one._replace(room=before[one.slot]) if one.slot in grown else one for one in kept]


THREE, TO_GROW = Case(sends=[[[1, 1, 1]]]), Case(sends=[[[2]]])
BROKEN_OFF = Case(sends=[[[1, 1], [1]]], resets=True)
AHEAD_OF_OTHERS = Case(sends=[[[], [1, 1]], [[1], []]])
DYING = Case(sends=[[[1]]], deaths=True)
DYING_MORE = Case(sends=[[[1]], [[1, 1]]], deaths=True)
ALL_AHEAD = Case(sends=[[[1, 1], []], [[], [1]]], ahead=2)
TWO_ROUNDS = Case(sends=[[[1], [1]], [[1], [1]]])
TWO_OF_EACH = Case(sends=[[[1]], [[1]]])


def faults() -> list[Fault]:
    """All of them."""
    return [
        Fault("written too early", THREE, Makers(sender=SaysSoAtOnce), "is read from slot"),
        Fault("writes what is not there", THREE, Makers(sender=WritesAhead), "not computed yet"),
        Fault("keeps dropped places", BROKEN_OFF, Makers(sender=KeepsPlaces), "does not have"),
        Fault("drops earlier rounds", BROKEN_OFF, Makers(sender=DropsAll), "deadlock"),
        Fault("writes to the lost", DYING, Makers(sender=WritesToTheLost), "receiver that is lost"),
        Fault("free before it is read", THREE, Makers(receiver=FreesEarly), "is given, which rank 1"),
        Fault("free while it is written", BROKEN_OFF, Makers(receiver=ForgetsAsks), "does not have"),
        Fault("no word of what is unwanted", BROKEN_OFF, Makers(receiver=IsSilent), "deadlock"),
        Fault("later rounds take slots", AHEAD_OF_OTHERS, Makers(receiver=TakesAnyRound), "deadlock"),
        Fault("later rounds are taken", TWO_ROUNDS, Makers(receiver=TakesEarly), "comes in another round"),
        Fault("written nowhere", THREE, Makers(receiver=TakesWhatIsNowhere), "is taken"),
        Fault("all slots ahead", ALL_AHEAD, Makers(receiver=GivesAll), "deadlock"),
        Fault("slots of the dead", DYING_MORE, Makers(receiver=GivesTheLost), "may write to"),
        Fault("places of others", TWO_OF_EACH, Makers(receiver=AnyonesPlaces), "is taken"),
        Fault("too small", TO_GROW, Makers(receiver=NeverGrows), "is refused"),
    ]
