"""Faults put into the core on purpose, each of which the exploration must find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rrfp_jax.core.admission import Admission, ByChunk, Whole
from rrfp_jax.core.events import Arrived, Chosen, Dispatch, Event, Room
from rrfp_jax.core.group import NOTHING, Answer, Follower, GroupMessage, Member, Unanimous
from rrfp_jax.core.hints import BF, BPriority, FPriority, Ranked
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement, Task
from rrfp_jax.core.v_orders import ZBV
from tests.verification.exploration.cases import Anything
from tests.verification.exploration.space import Case, Maker, real


@dataclass(frozen=True)
class Fault:
    """What is wrong, a case in which it shows, machines that have it, and what must be said of it."""

    name: str
    case: Case
    make: Maker
    said: str


class WhateverFits(ByChunk):
    """Admits whatever fits, with nothing kept back for lower microbatches."""

    def admits(self, chunk: int, microbatch: int) -> bool:
        """Only what fits."""
        return self._limit is None or self.held + self._costs[chunk][microbatch] <= self._limit


class ForTheLowestOnly(ByChunk):
    """Keeps room for the lowest unfinished microbatch, and for no other."""

    def admits(self, chunk: int, microbatch: int) -> bool:
        """By the sum of one microbatch instead of all."""
        if self._limit is None or microbatch <= self._lowest:
            return True
        return self._sums[self._lowest] + self._level + self._costs[chunk][microbatch] <= self._limit


class PerChunk(ByChunk):
    """Keeps room for the F of each lower microbatch, but not for what its other chunks need."""

    def admits(self, chunk: int, microbatch: int) -> bool:
        """By what was right for stages that charge microbatches whole."""
        if self._limit is None:
            return True
        waiting = [j for j in range(microbatch) if (chunk, j) not in self._started]
        reserve = max((self._costs[chunk][j] for j in waiting), default=0)
        return self.held + self._costs[chunk][microbatch] + reserve <= self._limit

    def __init__(self, costs: Sequence[Sequence[int]], limit: int | None) -> None:
        super().__init__(costs, limit)
        self._started: set[tuple[int, int]] = set()

    def admit(self, chunk: int, microbatch: int) -> None:
        """Noted by chunk."""
        super().admit(chunk, microbatch)
        self._started.add((chunk, microbatch))


class Reserving(ByChunk):
    """Keeps an order's room even from the lowest unfinished microbatch."""

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        """Without the exception."""
        lowest, self._lowest = self._lowest, -1
        found = super().leaves_room(task, order, start, stop)
        self._lowest = lowest
        return found


class WithoutReserve(Whole):
    """Admits whatever fits, with nothing kept back for lower microbatches."""

    def _reserve(self, microbatch: int) -> int:
        return 0


class AdmitsAll(Whole):
    """Admits everything."""

    def admits(self, chunk: int, microbatch: int) -> bool:
        """Always."""
        return True


class KeepsTooMuch(Whole):
    """Keeps room for a microbatch that nobody waits for."""

    def admits(self, chunk: int, microbatch: int) -> bool:
        """Only below the limit."""
        return super().admits(chunk, microbatch) and (self._limit is None or self.held + 1 < self._limit)


def admitting(rule: type[Admission]) -> Maker:
    """Machines whose stages admit by a wrong rule."""

    class Scheduler(StageScheduler):
        by_chunk = whole = rule

    return partial(real, scheduler=Scheduler)


class HastyScheduler(StageScheduler):
    """Adds parked gradients in the wrong order."""

    def handle(self, event: Event) -> Dispatch | None:
        """As it should, the other way round."""
        dispatch = super().handle(event)
        return dispatch and dispatch._replace(additions=dispatch.additions[::-1])


class CredulousScheduler(StageScheduler):
    """Keeps what was only foreseen as arrived, though another task was chosen."""

    def _foresee(self, room: Room) -> tuple[Task, object] | None:
        for foreseen in room.foreseen:
            self._progress.arrive(foreseen)
        return self._choose(room.late)

    def handle(self, event: Event) -> Dispatch | None:
        """As it should, but that what was foreseen may come."""
        come = isinstance(event, Arrived) and self._progress.refusal(event.input) is not None
        return None if come else super().handle(event)


class HastyFollower(Follower):
    """Runs any decision whose input it has, and not the next one."""

    def handle(self, event: Event | GroupMessage) -> Answer:
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

    def handle(self, event: Event | GroupMessage) -> Answer:
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


def admissions() -> Sequence[Fault]:
    """Wrong rules for what may be in flight."""
    any_split = Anything(splits=True, chunks=True)
    one = StepRules(placement=Placement(2), microbatches=2, schedule=any_split, spare_gradients=0)
    two = replace(one, placement=Placement(2, 2), schedule=Anything(chunks=True))
    whole = replace(one, schedule=Anything())
    ranked = StepRules(placement=Placement(2, 2, "v"), microbatches=2, schedule=Ranked(ZBV()), limit=1)
    limited = StepRules(placement=Placement(2), microbatches=2, schedule=BF(), limit=1)

    def anyhow(rules: StepRules, *budgets: Budget) -> Case:
        return Case(rules=rules, budgets=budgets, any_choice=True)

    equal, dear = Budget([[3, 3]], 4), Budget([[1, 3, 1]], 3)
    chunks = Budget([[2, 3], [3, 1]], 7), Budget([[3, 3], [1, 2]], 5)
    longer = replace(one, microbatches=3)
    return (
        Fault("no reserve", anyhow(whole, equal, equal), admitting(WithoutReserve), "deadlock"),
        Fault("no safety", anyhow(one, equal, equal), admitting(WhateverFits), "deadlock"),
        Fault("one reserve", anyhow(longer, dear, dear), admitting(ForTheLowestOnly), "is held where"),
        Fault("a reserve a chunk", anyhow(two, *chunks), admitting(PerChunk), "deadlock"),
        Fault("no exception", Case(rules=ranked), admitting(Reserving), "nothing runs, but F0.1"),
        Fault("no limit", Case(rules=limited), admitting(AdmitsAll), "2 is held"),
        Fault(
            "idleness",
            Case(rules=replace(limited, microbatches=3, limit=2)),
            admitting(KeepsTooMuch),
            "nothing runs, but F1",
        ),
    )


def faults() -> Sequence[Fault]:
    """All of them."""
    parking = StepRules(placement=Placement(2), microbatches=2, schedule=BF(), spare_gradients=1)
    led = Case(rules=parking, ranks=2)
    voting = Case(rules=parking, ranks=2, protocol="unanimous")
    return (
        *admissions(),
        Fault("sums in disorder", Case(rules=parking), partial(real, scheduler=HastyScheduler), "of turn"),
        Fault("foresight kept", Case(rules=parking), partial(real, scheduler=CredulousScheduler), "is there"),
        Fault("decisions in disorder", led, follower, "where another has run"),
        Fault("votes not kept", voting, voter, "where another has run"),
        Fault("no unanimity", voting, divided, "deadlock"),
    )
