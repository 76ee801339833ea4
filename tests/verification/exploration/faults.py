"""Faults put into the core on purpose, each of which the exploration must find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rrfp_jax.core.admission import Admission
from rrfp_jax.core.events import Arrived, Chosen, Dispatch, Event, Room
from rrfp_jax.core.group.group import Member
from rrfp_jax.core.group.leader import Follower
from rrfp_jax.core.group.messages import NOTHING, Answer, Message
from rrfp_jax.core.group.unanimous import Unanimous
from rrfp_jax.core.hints import BF, BPriority, FPriority
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from tests.verification.exploration.machines import Case, Maker, real


@dataclass(frozen=True)
class Fault:
    """What is wrong, a case in which it shows, machines that have it, and what must be said of it."""

    name: str
    case: Case
    make: Maker
    said: str


class WithoutReserve(Admission):
    """Admits whatever fits, with nothing kept back for lower microbatches."""

    def _reserve(self, microbatch: int) -> int:
        return 0


class AdmitsAll(Admission):
    """Admits everything."""

    def admits(self, microbatch: int) -> bool:
        """Always."""
        return True


class KeepsTooMuch(Admission):
    """Keeps room for a microbatch that nobody waits for."""

    def admits(self, microbatch: int) -> bool:
        """Only below the limit."""
        return super().admits(microbatch) and (self._limit is None or self.held + 1 < self._limit)


class UnsafeScheduler(StageScheduler):
    """Deadlocks when stages admit different microbatches."""

    admission = WithoutReserve


class UnlimitedScheduler(StageScheduler):
    """Exceeds its limit."""

    admission = AdmitsAll


class TimidScheduler(StageScheduler):
    """Idles although it could run something."""

    admission = KeepsTooMuch


class HastyScheduler(StageScheduler):
    """Adds parked gradients in the wrong order."""

    def handle(self, event: Event) -> Dispatch | None:
        """As it should, the other way round."""
        dispatch = super().handle(event)
        return dispatch and dispatch._replace(additions=dispatch.additions[::-1])


class HastyFollower(Follower):
    """Runs any decision whose input it has, and not the next one."""

    def handle(self, event: Event | Message) -> Answer:
        """As it should but for room."""
        if isinstance(event, Room):
            for position, task in self._decided.items():
                if dispatch := self.scheduler.handle(Chosen(task)):
                    del self._decided[position]
                    return Answer(dispatch)
            return NOTHING
        return super().handle(event)


class HastyVoter(Unanimous):
    """Takes in what arrives after its proposal, so that it may run another task than it proposed."""

    def handle(self, event: Event | Message) -> Answer:
        """As it should but for arrivals."""
        if not isinstance(event, Arrived):
            return super().handle(event)
        self.scheduler.handle(event)
        return NOTHING


def follower(case: Case, stage: int, rank: int) -> Member:
    """The core's leader and hasty followers."""
    return HastyFollower(StageScheduler(stage, case.rules), rank) if rank else real(case, stage, rank)


def voter(case: Case, stage: int, rank: int) -> Member:
    """Hasty voters."""
    return HastyVoter(StageScheduler(stage, case.rules), rank, case.ranks)


def divided(case: Case, stage: int, rank: int) -> Member:
    """The core's voters with hints that differ, so that they may never be unanimous."""
    hint = FPriority() if rank else BPriority()
    return Unanimous(StageScheduler(stage, replace(case.rules, schedule=hint)), rank, case.ranks)


def faults() -> Sequence[Fault]:
    """All of them."""
    rules = StepRules(placement=Placement(2), microbatches=3, schedule=BF(), spare_gradients=0)
    parking = StepRules(placement=Placement(2), microbatches=2, schedule=BF(), spare_gradients=1)
    unequal = Case(rules=rules, budgets=(Budget((1, 1, 1), 2), Budget((1, 1, 1), 1)))
    limited = StepRules(placement=Placement(2), microbatches=2, schedule=BF(), limit=1)
    roomy = replace(limited, limit=2)
    led = Case(rules=parking, ranks=2)
    voting = Case(rules=parking, ranks=2, protocol="unanimous")
    return (
        Fault("no reserve", unequal, partial(real, scheduler=UnsafeScheduler), "deadlock"),
        Fault(
            "no limit",
            Case(rules=limited),
            partial(real, scheduler=UnlimitedScheduler),
            "2 is held",
        ),
        Fault("idleness", Case(rules=roomy), partial(real, scheduler=TimidScheduler), "nothing runs, but F1"),
        Fault("sums in disorder", Case(rules=parking), partial(real, scheduler=HastyScheduler), "of turn"),
        Fault("decisions in disorder", led, follower, "where another has run"),
        Fault("votes not kept", voting, voter, "where another has run"),
        Fault("no unanimity", voting, divided, "deadlock"),
    )
