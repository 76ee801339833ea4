"""A makespan that no order beats which splits the same backwards as a schedule and keeps to the same limits.

Beside that of one machine (`rrfp_jax/sim/bounds.py`) there is a bound by what stages hold.

**Places.** Under a limit a chunk of a microbatch holds its share from the start of its F to the end of its
B or W (it is given back at that one's start, but nothing else can begin on the stage until its end), so at
least as long as its tree demands. Share times time held, summed over chunks and microbatches, fits into limit
times the span from the first of these starts to the last of these ends, before which lies the shortest head
and after which the shortest tail. Of the limit only a multiple of the shares' greatest common divisor can be
held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rrfp_jax.core.step_rules import Budget, StepRules, charges_of
from rrfp_jax.sim.bounds import Operation, one_machine, operations
from rrfp_jax.trace.costs import StepCosts


def bound_within(
    rules: StepRules, costs: StepCosts, *, budgets: Sequence[Budget | None] | None = None
) -> float:
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
