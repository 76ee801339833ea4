"""How long tasks take in the median, nearly at worst, and at worst, by stage and kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.core.measure.trace import StepTrace, TaskRecord
from rrfp_jax.core.tasks import Kind


class Tail(NamedTuple):
    """The durations of a stage's tasks of a kind (s), and which was the longest."""

    stage: int
    kind: Kind
    median: float
    p95: float
    worst: float
    step: int
    microbatch: int


def tails(traces: Sequence[StepTrace]) -> list[Tail]:
    """By stage and kind; quantiles are of the nearest rank."""
    found: dict[tuple[int, Kind], list[tuple[float, int, TaskRecord]]] = defaultdict(list)
    for trace in traces:
        for record in trace.records:
            found[record.stage, record.task.kind].append((record.end - record.start, trace.step, record))
    tails = []
    for (stage, kind), own in sorted(found.items()):
        own.sort(key=lambda task: task[0])
        seconds = [task[0] for task in own]
        worst, step, record = own[-1]
        middle, late = seconds[(len(own) - 1) // 2], seconds[int(0.95 * (len(own) - 1) + 0.5)]
        tails.append(Tail(stage, kind, middle, late, worst, step, record.task.microbatch))
    return tails
