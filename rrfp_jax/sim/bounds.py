"""A time that no order of a step's tasks can beat, whether it is planned or decides as it goes.

Two bounds are taken for every stage, and the largest of all is returned. Both use only that a stage runs one task
at a time, what each task needs, and the limits in flight; so transfers, uneven durations, several chunks and
split backwards need no special treatment. An operation's head and tail are explained in `operations.py`.

**One machine.** Every order runs the stage's operations one at a time, each no earlier than its head, and the
step lasts at least for its tail afterwards. Jackson's schedule (always the operation with the longest tail, which
may be interrupted) is the shortest of all that keep to this, interruptible ones included (Carlier,
"The one-machine sequencing problem", European Journal of Operational Research 11, 1982). It is at least the
stage's work (the bound of arXiv:2605.18750, section 6), plus the time before the first and after the last task.

**Slots.** Under a limit a microbatch holds its share of it from the start of its first forward on the stage to the
start of its last releasing task, at least as long as the tree demands. Share times holding time, summed over the
microbatches, fits into limit times the span from the first of these starts to the last, before which lies the
shortest head and after which the shortest releasing task with its tail.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rrfp_jax.core.hints import BF, Hint
from rrfp_jax.core.scheduler import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.costs import Costs
from rrfp_jax.sim.operations import Operation, operations


class _SplitEverywhere(BF):
    """Every backward in two parts."""

    def split(self, stage: int, placement: Placement, microbatches: int) -> set[tuple[int, int]]:
        return {(c, j) for c in range(placement.chunks) for j in range(microbatches)}


def lower_bound(
    rules: StepRules,
    costs: Costs,
    *,
    budgets: Sequence[Budget | None] | None = None,
    any_split: bool = False,
) -> float:
    """A makespan (s) that no order can beat which splits the same backwards and keeps to the same limits.

    As in the core, the limits apply to hints only. The bound is exact up to the rounding of sums.

    Args:
        rules: of the step; its schedule says only which backwards are split.
        costs: of its tasks and transfers, which must not depend on the order.
        budgets: in bytes, per stage.
        any_split: bound the orders that split whatever they like and have no limit. A fused B can be seen as
            I and W one after the other, whose gradient leaves late; so this is the bound of all split.

    Raises:
        ValueError: what the core refuses of the rules.
    """
    if any_split:
        rules, budgets = replace(rules, schedule=_SplitEverywhere(), limit=None), None
    limited = isinstance(rules.schedule, Hint)
    by_stage: list[list[Operation]] = [[] for _ in range(rules.placement.stages)]
    for operation in operations(rules, costs):
        by_stage[operation.stage].append(operation)
    bounds = [one_machine((o.head, o.duration, o.tail) for o in stage) for stage in by_stage]
    for stage, budget in zip(by_stage, budgets or [None] * len(by_stage), strict=True):
        if limited and rules.limit is not None:
            bounds.append(_slots(stage, Budget([1] * rules.microbatches, rules.limit)))
        if limited and budget is not None:
            bounds.append(_slots(stage, budget))
    return max(bounds)


def one_machine(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The length of Jackson's preemptive schedule of (head, duration, tail), in O(n log n)."""
    coming = sorted(jobs, reverse=True)
    waiting: list[tuple[float, float]] = []  # -tail, what remains of the duration: longest tail first
    now = length = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, duration, tail = coming.pop()
            heapq.heappush(waiting, (-tail, duration))
        tail, remaining = heapq.heappop(waiting)
        end = now + remaining
        if coming and coming[-1][0] < end:
            heapq.heappush(waiting, (tail, end - coming[-1][0]))
            now = coming[-1][0]
        else:
            now = end
            length = max(length, end - tail)
    return length


def _slots(stage: Sequence[Operation], budget: Budget) -> float:
    """The bound by what the microbatches of a stage hold of its limit."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for o in stage:
        j = o.task.microbatch
        first[j] = min(first.get(j, o.head), o.head)
        last[j] = max(last.get(j, o.head), o.head)
    held = sum(budget.costs[j] * (last[j] - first[j]) for j in first)
    return min(first.values()) + held / budget.limit + min(o.duration + o.tail for o in stage)
