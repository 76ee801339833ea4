"""The chain of tasks, transfers and waits that made a step as long as it was, followed back from its end.

What kept a task from beginning earlier is either its input, if that came after the device was free, or else
the task that the device was busy with.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from rrfp_jax.core.tasks import Task
from rrfp_jax.trace.idleness import Cause
from rrfp_jax.trace.records import StepTrace, TaskRecord


class Stretch(NamedTuple):
    """A part of the chain, in seconds: a task that ran on a stage, or why it had not begun."""

    stage: int
    task: Task
    start: float
    end: float
    cause: Cause | None  # None: it ran


def critical_path(trace: StepTrace, grouped: bool = False) -> list[Stretch]:
    """Its stretches in the order of time, each beginning where the one before ends; they fill the step."""
    rows = map(trace.stage_records, range(trace.stages))
    before = {(b.stage, b.task): a for row in rows for a, b in pairwise(row)}  # on the same device
    path: list[Stretch] = []
    record: TaskRecord | None = max(trace.records, key=lambda r: r.end)
    now = trace.end

    def add(cause: Cause | None, since: float, of: TaskRecord) -> None:
        nonlocal now
        since = min(max(since, trace.start), now)  # clocks of several processes agree only so well
        if since < now:
            path.append(Stretch(of.stage, of.task, since, now, cause))
        now = since

    while record is not None:
        add(None, record.start, record)
        last, sender = before.get((record.stage, record.task)), trace.sender(record)
        free = trace.start if last is None else last.end
        if grouped:
            add(Cause.HOST, max(record.dispatched, record.ready, free), record)
        waited = Cause.GROUP if grouped else Cause.HOST
        if record.ready > free and sender is not None:
            add(waited, record.ready, record)
            add(Cause.LINK, sender.end, record)
            record = sender
        else:
            add(waited, free, record)
            record = last
    return path[::-1]
