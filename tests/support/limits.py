"""A makespan that no order beats which splits the same backwards as a schedule and keeps to the same limits.

Beside that of one machine (`rrfp_jax/studies/bounds.py`) there is a bound by what stages hold.

**Places.** Under a limit a chunk of a microbatch holds its share from the start of its F to the end of its
B or W (it is given back at that one's start, but nothing else can begin on the stage until its end), so at
least as long as its tree demands. Share times time held, summed over chunks and microbatches, fits into limit
times the span from the first of these starts to the last of these ends, before which lies the shortest head
and after which the shortest tail. Of the limit only a multiple of the shares' greatest common divisor can be
held.

Where a backward is not split, its B stands in the tree of operations in place of I, without a W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budgets, StepRules, charges_of
from rrfp_jax.core.tasks import FORWARD, KINDS, Direction, Task
from rrfp_jax.studies.bounds import one_machine
from rrfp_jax.trace.costs import StepCosts


@dataclass(eq=False, slots=True)
class Operation:
    """A task and its times (s); its input arrives `lag` after the end of the operation that it follows."""

    stage: int
    task: Task
    duration: float
    follows: Operation | None
    lag: float
    head: float
    tail: float = 0.0


def operations(rules: StepRules, costs: StepCosts) -> list[Operation]:
    """All operations of a step, split as its schedule says, by microbatch, each after what it needs."""
    placement = rules.placement
    stages = [StageScheduler(stage, rules) for stage in range(placement.stages)]
    found: list[Operation] = []

    def add(stage: int, task: Task, follows: Operation | None) -> Operation:
        head = lag = 0.0
        if follows is not None:
            lag = 0.0 if follows.stage == stage else costs.transfer(follows.stage, follows.task)
            head = follows.head + follows.duration + lag
        found.append(Operation(stage, task, costs.duration(stage, task), follows, lag, head))
        return found[-1]

    kinds = [rules.backward_kinds(stage) for stage in range(placement.stages)]
    places = [placement.place(v) for v in range(placement.last + 1)]
    for j in range(rules.microbatches):
        last = None
        for stage, chunk in places:
            last = add(stage, Task(FORWARD, chunk, j), last)
        chain = dict(zip(places, found[-len(places) :], strict=True))
        for stage, chunk in () if rules.forward_only else reversed(places):
            last = add(stage, stages[stage].task_for(Direction.BACKWARD, chunk, j), last)
            for kind in sorted(kinds[stage][chunk]):
                for own in (chain[stage, chunk], last):
                    if KINDS[kind].flow == 0 and KINDS[kind].after is own.task.kind:  # W, if that was I
                        add(stage, Task(kind, chunk, j), own)
    for operation in reversed(found):
        if (before := operation.follows) is not None:
            before.tail = max(before.tail, operation.lag + operation.duration + operation.tail)
    return found


def bound_within(rules: StepRules, costs: StepCosts, *, budgets: Budgets = None) -> float:
    """The largest bound of all stages (s), up to the rounding of sums; budgets are in bytes.

    As in the core, the limits are those of admission, which holds back hints only. Costs must not depend on
    the order.
    """
    by_stage: list[list[Operation]] = [[] for _ in range(rules.placement.stages)]
    for operation in operations(rules, costs):
        by_stage[operation.stage].append(operation)
    bounds = [one_machine((o.head, o.duration, o.tail) for o in stage) for stage in by_stage]
    for stage, budget in zip(by_stage, budgets or [None] * len(by_stage), strict=True):
        bounds += [
            _places(stage, costs_held, limit)
            for costs_held, limit in charges_of(rules, budget)
            if limit is not None
        ]
    return max(bounds)


def _places(stage: Sequence[Operation], costs: Sequence[Sequence[int]], limit: int) -> float:
    """The bound by what the chunks of microbatches hold of a stage's limit."""
    begins: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for o in stage:
        place = o.task.chunk, o.task.microbatch
        begins[place] = min(begins.get(place, math.inf), o.head)
        ends[place] = max(ends.get(place, 0.0), o.head + o.duration)
    held = sum(costs[chunk][j] * (ends[chunk, j] - begins[chunk, j]) for chunk, j in begins)
    span = 0.0
    if held > 0:
        unit = math.gcd(*(cost for own in costs for cost in own))
        span = held / (limit // unit * unit)
    return min(begins.values()) + span + min(o.tail for o in stage)
