"""*Planned*: the best order that the simulator finds for known costs, to be followed strictly.

It is the strongest rival of readiness-first, which knows nothing beforehand. The search spends a given number
of simulations, each under the rules of the step. Nothing in it depends on the clock.

1. **Candidates.** Every fixed order that is defined for the placement, and for every hint the order in which
   it dispatches. The core applies limits in flight to hints only; here a fixed order that exceeds them is
   refused.
2. **Local search.** The best candidates are improved by random moves. A move is kept if the makespan does not
   grow. *Relabel*: microbatches change places, in the orders of all stages alike. *Rerank*: tasks that start
   in some stretch of time are moved, and the result is used as a hint, so that what it dispatches is legal
   whatever was moved. The simulations are shared out by successive halving: to four candidates, then to the
   better two of these, then to the best.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import attrgetter
from types import NoneType
from typing import TypeAlias

from rrfp_jax.core.admission import most_parked
from rrfp_jax.core.hints import BF, Hint, Ranked
from rrfp_jax.core.orders import FixedOrder, ListedOrder
from rrfp_jax.core.scheduler import check_can_end
from rrfp_jax.core.schedules import NAMED, Schedule
from rrfp_jax.core.step_rules import Budgets, StepRules, charges_of
from rrfp_jax.core.tasks import FORWARD, KINDS, Placement, Task
from rrfp_jax.sim.choice import Candidate
from rrfp_jax.trace.costs import CostTable, StepCosts
from rrfp_jax.trace.records import StepTrace, TaskRecord, peak_charge

Rows: TypeAlias = Sequence[Sequence[Task]]
"""The order of each stage."""


def relabelled(rows: Rows, rng: random.Random) -> Rows:
    """Two microbatches change places, near or far alike, or one goes elsewhere, in all stages alike."""
    sequence = [task.microbatch for task in rows[0] if task[:2] == (FORWARD, 0)]
    new, here = sequence[:], rng.randrange(len(sequence))
    distance = round(len(sequence) ** rng.random()) * rng.choice((-1, 1))
    there = min(max(here + distance, 0), len(sequence) - 1)
    if rng.random() < 0.5:
        new[here], new[there] = new[there], new[here]
    else:
        new.insert(there, new.pop(here))
    label = dict(zip(sequence, new, strict=True))
    return [[Task(kind, chunk, label[j]) for kind, chunk, j in row] for row in rows]


ALIKE: Sequence[Callable[[int, Task], object]] = (
    lambda stage, task: (stage, task),
    lambda stage, task: task.microbatch,
    lambda stage, task: (KINDS[task.kind].flow > 0, task.microbatch),
)
"""Which tasks are moved by the same time when they are ranked anew."""


def reranked(trace: StepTrace, rng: random.Random) -> Rows:
    """Tasks of some stretch of time are moved, by themselves or by microbatch; a ranking, not an order."""
    span = trace.makespan
    centre, half = rng.uniform(0.0, span), span * math.exp(rng.uniform(-3.0, 0.0))
    distance = span * math.exp(rng.uniform(-6.0, -2.0))
    alike = rng.choice(ALIKE)
    moves: dict[object, float] = defaultdict(lambda: rng.gauss(0.0, distance))

    def place(r: TaskRecord) -> float:
        return r.start if abs(r.start - centre) > half else r.start + moves[alike(r.stage, r.task)]

    rows = map(trace.stage_records, range(trace.stages))
    return [[r.task for r in sorted(row, key=place)] for row in rows]


EVALUATIONS = 200
"""Simulations that a plan takes unless told otherwise."""

KEPT = (4, 2, 1)
"""How many candidates are improved, round by round."""

RELABEL, ATTEMPTS = 0.75, 10
"""Share of the moves that relabel, and how often that is tried until an order is legal."""


@dataclass(frozen=True)
class Plan:
    """A planned order, and what the step takes with it (s)."""

    order: ListedOrder
    makespan: float


def plan(
    step: Candidate, candidates: Mapping[str, Schedule] = NAMED, evaluations: int = EVALUATIONS, seed: int = 0
) -> Plan:
    """The best order found for a step whose costs are known; ValueError if every candidate is refused.

    The schedule of its rules does not matter. Their limit, which the core applies to hints only, and budgets
    in bytes hold for the plan, too. If no candidate splits backwards, the plan does not either. Simulations
    of the candidates count among the `evaluations`, and are made in any case.
    """
    planner = _Planner(step)
    found: list[StepTrace] = []
    refused: list[str] = []
    for name, schedule in candidates.items():
        try:
            found.append(planner.candidate(schedule))
        except ValueError as error:
            refused.append(f"{name}: {error}")
    if not found:
        raise ValueError(f"no candidate for a plan: {'; '.join(refused)}")
    best = planner.improved(found, evaluations, random.Random(seed))
    return Plan(planner.order_of(best), best.makespan)


_makespan = attrgetter("makespan")


@dataclass
class _Planner:
    """Simulates, counts, and improves orders of one step."""

    step: Candidate
    evaluations: int = 0

    def candidate(self, schedule: Schedule) -> StepTrace:
        """What a schedule does. Raises ValueError if it is not defined here or exceeds a limit."""
        if isinstance(schedule, FixedOrder):
            rules = replace(self.step.rules, schedule=schedule)
            check_can_end(rules)
            rows = [own.order for own in rules.stages]
            if (why := self._refusal(rows)) is not None:
                raise ValueError(why)
        return self._simulated(schedule)

    def improved(self, pool: list[StepTrace], evaluations: int, rng: random.Random) -> StepTrace:
        """The best after the local search."""
        for at, kept in enumerate(KEPT):
            different = {self.order_of(trace): trace for trace in pool}
            pool = sorted(different.values(), key=_makespan)[:kept]
            each = (evaluations - self.evaluations) // ((len(KEPT) - at) * len(pool))
            pool = [self._climbed(trace, each, rng) for trace in pool]
        return min(pool, key=_makespan)

    def order_of(self, trace: StepTrace) -> ListedOrder:
        """What is dispatched."""
        return self._listed([trace.order(stage) for stage in range(trace.stages)])

    def _climbed(self, best: StepTrace, evaluations: int, rng: random.Random) -> StepTrace:
        rows = self.order_of(best).rows
        for _ in range(evaluations):
            attempts = ATTEMPTS if rng.random() < RELABEL else 0
            moved = (relabelled(rows, rng) for _ in range(attempts))
            found = next((one for one in moved if self._refusal(one) is None), None)
            order = self._listed(reranked(best, rng) if found is None else found)
            new = self._simulated(Ranked(order) if found is None else order)
            if new.makespan <= best.makespan:  # equals, too, so that the search moves on plateaus
                best, rows = new, self.order_of(new).rows
        return best

    def _simulated(self, schedule: Schedule) -> StepTrace:
        """What a schedule dispatches under the rules of the step."""
        self.evaluations += 1
        return replace(self.step, rules=replace(self.step.rules, schedule=schedule)).simulated()

    def _listed(self, rows: Rows) -> ListedOrder:
        rules = self.step.rules
        return ListedOrder(rules.placement, rules.microbatches, tuple(map(tuple, rows)))

    def _refusal(self, rows: Rows) -> str | None:
        """Why orders cannot be followed within the limits; None if they can."""
        rules, budgets = replace(self.step.rules, schedule=BF()), self.step.budgets  # as for a hint
        chunks = rules.placement.chunks
        for stage, row in enumerate(rows):
            charges = charges_of(rules, budgets[stage] if budgets else None)
            for what, (costs, limit) in zip(("in flight", "in bytes", "in flight"), charges, strict=False):
                if limit is not None and peak_charge(row, costs) > limit:
                    return f"exceeds the limit {what} on stage {stage}"
            if rules.accumulation == "index" and most_parked(row, chunks) > rules.spare_gradients:
                return f"has no place for a gradient on stage {stage}"
        return None


MOST_EVALUATIONS = 1_000_000
"""Simulations for one step: hours of them."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best fixed order that the simulator finds for what a step's tasks take, followed strictly.

    It is found on every process before each step, by a number of simulations and not by a time, so that it is
    the same everywhere. It keeps to the step's limits in flight, by count and in bytes, as a hint does.

    Attributes:
        costs: what tasks and transfers take by bucket, or the JSON file with it (`docs/performance.md`); None
            for the medians of the run's own latest steps.
        base: what is followed in forward-only passes, and in steps with a bucket that has not been measured
            yet. Plans split the backwards that it splits, and no others, and have its programs.
        evaluations: simulations that a plan may take; those of the first candidates are made in any case.

    Raises:
        ValueError: a field of another type, or `evaluations` below 0.
    """

    costs: CostTable | str | None = None
    base: Schedule = field(default_factory=BF)
    evaluations: int = EVALUATIONS

    def __post_init__(self) -> None:
        number = self.evaluations
        whole = isinstance(number, Integral) and not isinstance(number, bool)
        if not whole or not 0 <= number <= MOST_EVALUATIONS:
            raise ValueError(
                f"evaluations={number!r}: give a number of simulations, from 0 to {MOST_EVALUATIONS:,}"
            )
        if not isinstance(self.base, (Hint, FixedOrder)):
            raise ValueError(f"base={self.base!r}: give a schedule, such as BF()")
        if not isinstance(self.costs, (CostTable, str, NoneType)):
            raise ValueError(f"costs={self.costs!r}: give the name of a file, or None for measured ones")

    @property
    def hint(self) -> Hint:
        """The base as a hint: what it ranks first, within the limits."""
        return self.base if isinstance(self.base, Hint) else Ranked(self.base)

    def plan(self, rules: StepRules, costs: StepCosts, budgets: Budgets = None) -> Plan:
        """The order for a step, whatever the schedule in its rules; budgets are in bytes, per stage."""
        candidates: dict[str, Schedule] = {} if self.hint in NAMED.values() else {"base": self.hint}
        for name, schedule in NAMED.items():
            if isinstance(schedule, FixedOrder):
                candidates[name] = _SplitAlike(schedule, self.hint)
            elif _splits(schedule, rules) == _splits(self.hint, rules):
                candidates[name] = schedule
        step = Candidate(rules=rules, costs=costs, budgets=budgets)
        made = plan(step, candidates=candidates, evaluations=self.evaluations)
        turns = self.hint.turns_back(rules.placement, rules.microbatches)
        return replace(made, order=replace(made.order, turns=turns))


def base_of(schedule: Schedule | Planned) -> Schedule:
    """A schedule itself; of planned orders, what is followed where there are none."""
    return schedule.base if isinstance(schedule, Planned) else schedule


@dataclass(frozen=True)
class _SplitAlike(FixedOrder):
    """A fixed order in which those backwards are split that another schedule splits."""

    inner: FixedOrder
    hint: Hint

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """W follows I at once where a B is taken apart; B is where I was where they are joined."""
        split = self.hint.split(stage, placement, microbatches)
        found: list[Task] = []
        for task in self.inner.order(stage, placement, microbatches):
            whole = task.kind.whole
            if (task.chunk, task.microbatch) in split:
                found += [task._replace(kind=part) for part in KINDS[task.kind].parts]
            elif task.kind in (whole, KINDS[whole].parts[0]):
                found.append(task._replace(kind=whole))
        return found


def _splits(hint: Hint, rules: StepRules) -> list[Collection[tuple[int, int]]]:
    stages = range(rules.placement.stages)
    return [set(hint.split(stage, rules.placement, rules.microbatches)) for stage in stages]
