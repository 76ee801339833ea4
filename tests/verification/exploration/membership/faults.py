"""Faults put into the machine on purpose, each of which the exploration must find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rrfp_jax.runtime.run.membership import (
    Beat,
    Echo,
    Failed,
    Gone,
    Goodbye,
    Membership,
    PeerClock,
    Said,
    Send,
)
from tests.verification.exploration.membership.world import GRACE, UNIT, Case, Machine


@dataclass(frozen=True)
class Fault:
    """A machine with something wrong, a case in which it shows, and what must be said of it."""

    machine: Machine
    case: Case
    said: str

    @property
    def name(self) -> str:
        """What is wrong."""
        return (self.machine.__doc__ or "").rstrip(".")


KILLED, FAILED, LEFT = Case(2, ("kill",)), Case(2, ("fail",)), Case(2, leaves=True)
FROZEN, CUT, STOPPED = Case(2, ("freeze", "thaw")), Case(2, ("cut",)), Case(2, ("stop",))
HOST = Case(2, ("kill",), leaves=True, host=True)
TWO_KILLED, ONE_KILLED, TWO_FAILED = Case(3, ("kill", "kill")), Case(3, ("kill",)), Case(3, ("fail", "fail"))


class LastReason(Membership):
    """The last reason counts."""

    def _note(self, rank: int, gone: Gone) -> None:
        self.gone = {**self.gone, rank: gone}


class FirstReason(Membership):
    """The first reason counts, whatever the process itself says."""

    def _note(self, rank: int, gone: Gone) -> None:
        self.gone = {rank: gone, **self.gone}


class AnyWord(Membership):
    """A goodbye counts more than what was seen before."""

    def _note(self, rank: int, gone: Gone) -> None:
        if gone.how == "left":
            self.gone = {**self.gone, rank: gone}
        super()._note(rank, gone)


class Accuses(Membership):
    """A process that stood still judges by the silence before."""

    def tick(self, now: float) -> Sequence[Send]:
        self._ticked = now
        return super().tick(now)


class Remembers(Membership):
    """A process that stood still judges by the silence before at its next tick."""

    def tick(self, now: float) -> Sequence[Send]:
        heard = dict(self._heard)
        sends = super().tick(now)
        self._heard = heard
        return sends


class Deaf(Membership):
    """Beats are no signs of life."""

    def heard(self, rank: int, now: float) -> None:
        pass


class Patient(Membership):
    """Silence is never judged."""

    def tick(self, now: float) -> Sequence[Send]:
        self._heard = dict.fromkeys(self._heard, now)
        return super().tick(now)


class Hasty(Membership):
    """Silence is judged after half of its time."""

    def __init__(self, rank: int, others: Any, now: float, silence: float) -> None:
        super().__init__(rank, others, now, silence / 2)


class Neglects(Membership):
    """Who was given up hears nothing any more."""

    def tick(self, now: float) -> Sequence[Send]:
        return [([r for r in ranks if r not in self.gone], said) for ranks, said in super().tick(now)]


class Mute(Membership):
    """No signs of life are shown."""

    def tick(self, now: float) -> Sequence[Send]:
        super().tick(now)
        return ()


class Blind(Membership):
    """A connection that was closed says nothing."""

    def closed(self, rank: int, reason: str, now: float) -> None:
        if not reason.startswith("closed"):
            super().closed(rank, reason, now)


class CutOffSoon(Membership):
    """One lost process among several means to be cut off."""

    @property
    def is_cut_off(self) -> bool:
        return len(self.others) > 1 and any(one.how == "lost" for one in self.gone.values())


class NeverCutOff(Membership):
    """Nobody is cut off."""

    @property
    def is_cut_off(self) -> bool:
        return False


class CutOffByAll(Membership):
    """Who said why it failed counts as lost."""

    @property
    def is_cut_off(self) -> bool:
        return len(self.others) > 1 and self.all_gone and all(one.how != "left" for one in self.gone.values())


class NoGrace(Membership):
    """A process ends at the tick after a loss."""

    def overdue(self, now: float) -> Gone | None:
        return super().overdue(now + GRACE * UNIT)


class EndlessGrace(Membership):
    """A process that has lost another one never ends."""

    def overdue(self, now: float) -> Gone | None:
        return None


class EndsForLeavers(Membership):
    """A process ends because another one has left."""

    def overdue(self, now: float) -> Gone | None:
        return super().overdue(now) or next(iter(self.gone.values()), None)


class GoesOn(Membership):
    """A process beats after its goodbye."""

    def end(self, word: Goodbye | Failed) -> Sequence[Send]:
        sends = super().end(word)
        self._ended = isinstance(word, Failed)
        return sends


class StillJudges(Membership):
    """A process gives up others after its own failure."""

    def overdue(self, now: float) -> Gone | None:
        ended, self._ended = self._ended, False
        found = super().overdue(now)
        self._ended = ended
        return found


class NoGoodbye(Membership):
    """Nobody says goodbye."""

    def end(self, word: Goodbye | Failed) -> Sequence[Send]:
        sends = super().end(word)
        return sends if isinstance(word, Failed) else ()


class BlamesItself(Membership):
    """Who ends by another one's fault blames itself."""

    def end(self, word: Goodbye | Failed) -> Sequence[Send]:
        return super().end(Failed(self.rank, word.sentence) if isinstance(word, Failed) else word)


class BlamesMessenger(Membership):
    """Who says why it ends is blamed for it."""

    def received(self, rank: int, said: Said, now: float) -> Sequence[Send]:
        return super().received(rank, Failed(rank, said.sentence) if isinstance(said, Failed) else said, now)


class GoodbyeIsFailure(Membership):
    """A goodbye is taken for a failure."""

    def received(self, rank: int, said: Said, now: float) -> Sequence[Send]:
        return super().received(rank, Failed(rank, "left") if isinstance(said, Goodbye) else said, now)


class NoTrouble(Membership):
    """A host that leaves last overlooks those that were lost."""

    @property
    def trouble(self) -> Gone | None:
        return None


class LeavesEarly(Membership):
    """A host leaves when the first of the others has gone."""

    @property
    def all_gone(self) -> bool:
        return bool(self.gone)


class EchoesLater(Membership):
    """Rank 0 answers with a time that is not its own."""

    def received(self, rank: int, said: Said, now: float) -> Sequence[Send]:
        return super().received(rank, said, now + 2 * UNIT if isinstance(said, Beat) else now)


class AnyEcho(Membership):
    """Every rank answers beats, and every answer counts as rank 0's."""

    def received(self, rank: int, said: Said, now: float) -> Sequence[Send]:
        if isinstance(said, Beat):
            return [([rank], Echo(said.sent, now))]
        return super().received(0 if isinstance(said, Echo) else rank, said, now)


class _TooSure(PeerClock):
    def sample(self, sent: float, theirs: float, back: float) -> None:
        super().sample(sent, theirs, back)
        self.precision /= 4


class TooSure(Membership):
    """Rank 0's clock is held for known better than it is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clock = _TooSure()


def faults() -> list[Fault]:
    """All of them."""
    return [
        Fault(LastReason, LEFT, "holds rank"),
        Fault(FirstReason, Case(2, ("freeze", "thaw", "fail")), "holds rank"),
        Fault(AnyWord, Case(2, ("freeze", "thaw"), leaves=True), "holds rank"),
        Fault(Accuses, STOPPED, "holds rank"),
        Fault(Remembers, Case(2, ("freeze", "freeze", "thaw", "thaw")), "holds rank"),
        Fault(Deaf, Case(2), "which nothing has happened to|holds rank"),
        Fault(Patient, CUT, "holds rank"),
        Fault(Hasty, CUT, "holds rank"),
        Fault(Neglects, FROZEN, "which nothing has happened to|innocent|holds rank"),
        Fault(Mute, Case(2), "which nothing has happened to"),
        Fault(Blind, KILLED, "holds rank"),
        Fault(CutOffSoon, ONE_KILLED, "innocent|too early"),
        Fault(NeverCutOff, TWO_KILLED, "too late"),
        Fault(CutOffByAll, TWO_FAILED, "innocent|too early"),
        Fault(NoGrace, KILLED, "too early"),
        Fault(EndlessGrace, KILLED, "too late"),
        Fault(EndsForLeavers, LEFT, "too early|that left"),
        Fault(GoesOn, LEFT, "goes on after its end"),
        Fault(StillJudges, KILLED, "goes on after its end"),
        Fault(NoGoodbye, LEFT, "without a word"),
        Fault(BlamesItself, KILLED, "without saying why"),
        Fault(BlamesMessenger, Case(3, ("kill",)), "holds rank"),
        Fault(GoodbyeIsFailure, LEFT, "holds rank"),
        Fault(NoTrouble, HOST, "although rank"),
        Fault(LeavesEarly, Case(3, leaves=True, host=True), "although rank"),
        Fault(EchoesLater, Case(2), "clock of rank 0"),
        Fault(AnyEcho, Case(3), "clock of rank 0"),
        Fault(TooSure, Case(2), "clock of rank 0"),
    ]
