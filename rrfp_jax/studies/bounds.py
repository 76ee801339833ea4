"""A time that no order of a step's tasks can beat, whether it is planned or decides as it goes.

A bound is taken for every stage; the largest counts. It uses only that a stage runs one task at a time, and
what each task needs, so that transfers, uneven durations, several chunks and split backwards are nothing
special. `tests/support/limits.py` has a bound by what is in flight, too, and for orders that split only some
backwards. Heads and tails of operations are explained below.

**One machine.** Every order runs the stage's operations one at a time, each no earlier than its head, and
the step lasts at least for its tail afterwards. No schedule of such jobs on one machine, even of
interruptible ones, is shorter than Jackson's, which always runs the job with the longest tail (Carlier,
"The one-machine sequencing problem", European Journal of Operational Research 11, 1982). It is at least
as long as the stage's work (the bound of arXiv:2605.18750, section 6) with the shortest head before and
the shortest tail after it.

A step as scheduling theory sees it: operations on machines (the stages), each after at most one other.

A microbatch is a tree. F(0) ... F(last), I(last) ... I(0) is a chain, and every I has its W as a branch. The
*head* of an operation is the shortest time before its start, its *tail* the shortest time after its end. Both
are what its tree demands even if no stage is ever busy with other microbatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeAlias

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD, INPUT, WEIGHT, Task
from rrfp_jax.trace.costs import StepCosts

Job: TypeAlias = tuple[float, float, float]
"""The head, duration and tail of an operation (s)."""


def lower_bound(rules: StepRules, costs: StepCosts) -> float:
    """A makespan (s) that no order can beat, whatever it splits and holds, up to the rounding of sums.

    A fused B is I and then W, with the gradient leaving late, so no order beats the bound of those that split
    all backwards. Costs must not depend on the order.
    """
    placement = rules.placement
    places = [placement.place(v) for v in range(placement.last + 1)]
    chain = [(stage, FORWARD, chunk) for stage, chunk in places]
    chain += [] if rules.forward_only else [(stage, INPUT, chunk) for stage, chunk in places[::-1]]
    jobs: list[list[Job]] = [[] for _ in range(placement.stages)]
    for j in range(rules.microbatches):
        tasks = [(stage, Task(kind, chunk, j)) for stage, kind, chunk in chain]
        durations = [costs.duration(*own) for own in tasks]
        lags = [0.0 if own[0] == after[0] else costs.transfer(*own) for own, after in pairwise(tasks)]
        heads, tail = [0.0], 0.0
        for duration, lag in zip(durations, lags, strict=False):
            heads.append(heads[-1] + duration + lag)
        operations = [*zip(tasks, heads, durations, [0.0, *lags], strict=True)]
        for (stage, task), head, duration, lag in reversed(operations):
            if task.kind is INPUT:
                weight = costs.duration(stage, task._replace(kind=WEIGHT))
                jobs[stage].append((head + duration, weight, 0.0))
                tail = max(tail, weight)
            jobs[stage].append((head, duration, tail))
            tail = lag + duration + tail
    return max(map(one_machine, jobs))


def one_machine(jobs: Iterable[Job]) -> float:
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
