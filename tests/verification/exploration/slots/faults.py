"""Faults put into the machines on purpose, each of which the exploration must find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rrfp_jax.nixl.messages import Ask, Granted, Say, Written
from rrfp_jax.nixl.receiver import Copy, Receiver
from rrfp_jax.nixl.sender import Sender
from rrfp_jax.nixl.slots import SlabSlots, SlotTable
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
        return [*done, *(gift for place in copies for gift in self._given(self._places.release(place)))]

    def copied(self, place: int) -> Any:
        """Which is too late."""
        return []


class ForgetsAsks(Receiver):
    """Takes back the slots of a round that is broken off, from those who may be writing to them."""

    def _discard(self) -> Any:
        done = super()._discard()
        for asked in self._asked.values():
            if asked.state == "unwanted" and asked.place is not None:
                self._places.free(asked.place)
                asked.place = None
        return done


class IsSilent(Receiver):
    """Tells nobody that a message is unwanted."""

    def _discard(self) -> Any:
        return [one for one in super()._discard() if not isinstance(one, Say)]


class TakesAnyRound(Receiver):
    """Gives a place to what nobody can take yet, while others need it."""

    def asked(self, rank: int, ask: Ask) -> Any:
        """Asks at once."""
        done = super().asked(rank, ask)
        asked = self._asked[rank, ask.number]
        if asked.state == "early":
            self._ask(rank, ask.number, asked)
        return done + self._given(self._places.serve())


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


class GivesAll(SlotTable):
    """Keeps no slot for those who ask."""

    def release(self, number: int) -> Any:
        """As if there were one more."""
        slab = self._slabs[self[number].slab]
        slab.ahead -= 1
        done = super().release(number)
        slab.ahead += 1
        return done


class GivesTheLost(SlotTable):
    """The slots of who is gone go to others."""

    def lost(self, rank: int) -> None:
        """Frees them first."""
        for number in [n for n, place in self._all.items() if place.rank == rank and not place.copying]:
            self.free(number)
        super().lost(rank)


class AnyonesPlaces(SlotTable):
    """Everybody has every place."""

    def get(self, number: int) -> Any:
        """As if it were rank 2's, who has not asked for it."""
        place = super().get(number)
        return place and type(place)(**vars(place) | {"rank": 2, "number": None})


class NeverGrows(SlabSlots):
    """Takes a slot that is too small."""

    def take(self, slot: int, size: int = 0) -> bool:
        """As it is."""
        return super().take(slot)


def _with(places: type[SlotTable]) -> type[Receiver]:
    """A receiver with other places."""

    class Changed(Receiver):
        def __init__(self, slabs: Any, homes: Any, ahead: int) -> None:
            super().__init__(slabs, homes, ahead)
            self._places = places(slabs, ahead)

    # Machines are pickled, so each class must be found under its name.
    Changed.__qualname__ = Changed.__name__ = f"With{places.__name__}"
    return Changed


WithGivesAll, WithGivesTheLost = _with(GivesAll), _with(GivesTheLost)
WithAnyonesPlaces = _with(AnyonesPlaces)


class WithNeverGrows(Receiver):
    """A receiver whose slots never grow."""

    def __init__(self, slabs: Any, homes: Any, ahead: int) -> None:
        super().__init__([NeverGrows(slots.sizes) for slots in slabs], homes, ahead)


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
        Fault("all slots ahead", ALL_AHEAD, Makers(receiver=WithGivesAll), "deadlock"),
        Fault("slots of the dead", DYING_MORE, Makers(receiver=WithGivesTheLost), "may write to"),
        Fault("places of others", TWO_OF_EACH, Makers(receiver=WithAnyonesPlaces), "is taken"),
        Fault("too small", TO_GROW, Makers(receiver=WithNeverGrows), "is refused"),
    ]
