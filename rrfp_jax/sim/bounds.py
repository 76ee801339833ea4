"""A time that no order of a step's tasks can beat, whether it is planned or decides as it goes.

A bound is taken for every stage; the largest counts. It uses only that a stage runs one task at a time, and
what each task needs, so that transfers, uneven durations, several chunks and split backwards are nothing
special. `tests/support/limits.py` has a bound by what is in flight, too. Heads and tails of operations are
explained below.

**One machine.** Every order runs the stage's operations one at a time, each no earlier than its head, and
the step lasts at least for its tail afterwards. No schedule of such jobs on one machine, even of
interruptible ones, is shorter than Jackson's, which always runs the job with the longest tail (Carlier,
"The one-machine sequencing problem", European Journal of Operational Research 11, 1982). It is at least
as long as the stage's work (the bound of arXiv:2605.18750, section 6) with the shortest head before and
the shortest tail after it.

A step as scheduling theory sees it: operations on machines (the stages), each after at most one other.

A microbatch is a tree. F(0) ... F(last), B(last) ... B(0) is a chain; if a backward is split, I stands for B
and has a W as a branch. The *head* of an operation is the shortest time before its start, its *tail* the
shortest time after its end. Both are what its tree demands even if no stage is ever busy with other
microbatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rrfp_jax.core.hints import BF
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD, KINDS, Direction, Placement, Task
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


class _SplitEverywhere(BF):
    """Every backward in two parts."""

    def split(self, stage: int, placement: Placement, microbatches: int) -> set[tuple[int, int]]:
        return {(c, j) for c in range(placement.chunks) for j in range(microbatches)}


def lower_bound(rules: StepRules, costs: StepCosts) -> float:
    """A makespan (s) that no order can beat, whatever it splits and holds, up to the rounding of sums.

    A fused B is I and then W, with the gradient leaving late, so no order beats the bound of those that split
    all backwards. Costs must not depend on the order.
    """
    every = replace(rules, schedule=_SplitEverywhere(), limit=None)
    by_stage: list[list[Operation]] = [[] for _ in range(rules.placement.stages)]
    for operation in operations(every, costs):
        by_stage[operation.stage].append(operation)
    return max(one_machine((o.head, o.duration, o.tail) for o in stage) for stage in by_stage)


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
