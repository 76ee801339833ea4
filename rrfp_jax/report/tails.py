"""How long tasks take in the median, nearly at worst, and at worst, by stage and kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.core.tasks import Kind
from rrfp_jax.trace.records import StepTrace, TaskRecord

MOST_LATE = 4
"""Microbatches that are named of each tail."""


class Tail(NamedTuple):
    """The durations of a stage's tasks of a kind (s), without injected delays.

    `late` are the longest tasks, the longest first: step and microbatch. `delayed` are tasks with an injected
    delay, and `injected` the seconds of all of these.
    """

    stage: int
    kind: Kind
    median: float
    p95: float
    worst: float
    late: Sequence[tuple[int, int]]
    delayed: int
    injected: float


def tails(traces: Sequence[StepTrace]) -> list[Tail]:
    """By stage and kind; quantiles are of the nearest rank."""
    found: dict[tuple[int, Kind], list[tuple[float, int, TaskRecord]]] = defaultdict(list)
    for trace in traces:
        for record in trace.records:
            own = record.computed - record.start
            found[record.stage, record.task.kind].append((own, trace.step, record))
    tails = []
    for (stage, kind), tasks in sorted(found.items()):
        tasks.sort(key=lambda task: task[0])
        seconds = [task[0] for task in tasks]
        late = [(step, record.task.microbatch) for _, step, record in tasks[: -MOST_LATE - 1 : -1]]
        delays = [record.delayed for _, _, record in tasks if record.delayed]
        middle, p95 = quantile(seconds, 0.5), quantile(seconds, 0.95)
        tails.append(Tail(stage, kind, middle, p95, seconds[-1], late, len(delays), sum(delays)))
    return tails


def quantile(ordered: Sequence[float], at: float) -> float:
    """Of values in order, at least one, that of the nearest rank; the lower one between two.

    Args:
        ordered: the values.
        at: 0 for the first, 1 for the last.
    """
    return ordered[math.ceil(at * (len(ordered) - 1) - 0.5)]
