"""What it takes to have the core run a recorded step again in virtual time, so that it takes as long.

Two things are not in the tasks' own times. The host takes its part between an arrival and the task that runs
for it: that is added to the task. And the driver decides at moments of its own: it looks at all that has
arrived while it was busy, and queues a task some time before the one before it ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from statistics import median
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.tasks import Task
from rrfp_jax.trace.costs import TableCosts
from rrfp_jax.trace.records import StepTrace, TaskRecord

TOGETHER = 200e-6
"""Arrivals that follow each other within this time (s) are looked at together."""

MOSTLY_HOST = 3.0
"""A gap of so many times what the host usually takes may still be the host's."""

AFTERWARDS = 1e-9
"""Seconds by which what was not chosen arrives after what was."""

Place: TypeAlias = tuple[int, Task]
"""A task on a stage."""


class ReplayInputs(NamedTuple):
    """What a step is run again with: a task that ran as soon as its input came has the host's time.

    `leads` say how long before the end of a task the next one was chosen (s), where that is known; below 0 it
    was chosen so long after the end.
    """

    costs: TableCosts
    leads: Mapping[Place, float]


def replay_of(trace: StepTrace) -> ReplayInputs:
    """How to run a step again."""
    stages = [trace.stage_records(stage) for stage in range(trace.stages)]
    pairs = chain.from_iterable(map(pairwise, stages))
    # How long it took to see that a task had ended, where the next one was there already.
    noticed = [b.dispatched - a.end for a, b in pairs if b.ready <= a.end < b.dispatched]
    notice = MOSTLY_HOST * median(noticed or [0.0])
    durations: dict[Place, float] = {}
    arrivals: dict[Place, float] = {}  # by receiver
    leads: dict[Place, float] = {}
    for stage, records in enumerate(stages):
        arrivals |= {(stage, record.task): record.ready for record in records}
        _choose_first(records, trace, arrivals)
        earliest = [*accumulate((record.ready for record in reversed(records)), min)][::-1]
        for (last, record), ready in zip(pairwise(chain([None], records)), earliest, strict=True):
            assert record is not None
            # It may have been dispatched before its input came (core/foresight.py).
            place, began = (stage, record.task), max(record.dispatched, record.ready)
            if last is not None and (
                # It was chosen when the device was seen to be free, rather than when its input came.
                record.ready <= last.end
                or (ready <= last.end and record.ready <= record.dispatched <= last.end + notice)
            ):
                leads[stage, last.task] = last.end - began
                began = max(began, last.end)
            elif _arrives(trace, record):
                began = min(began, max(arrivals[place], trace.start if last is None else last.end))
            durations[place] = record.end - began
    transfers = {(a.stage, a.task): max(0.0, arrivals[b.stage, b.task] - a.end) for a, b in trace.transfers()}
    return ReplayInputs(TableCosts(durations, transfers), leads)


def _choose_first(records: Sequence[TaskRecord], trace: StepTrace, arrivals: dict[Place, float]) -> None:
    """Puts the chosen task first among a stage's `arrivals` that were looked at together."""
    waiting = sorted((r.ready, i) for i, r in enumerate(records) if _arrives(trace, r))
    times = [ready for ready, _ in waiting]
    for i, record in enumerate(records):
        if not _arrives(trace, record):
            continue
        after = first = bisect_right(times, record.dispatched)
        next_one = record.dispatched
        while first > 0 and next_one - times[first - 1] <= TOGETHER:
            first -= 1
            next_one = times[first]
        together = [k for _, k in waiting[first:after]]
        if i not in together:
            continue  # it was there before, and chosen for another reason
        places = [(record.stage, records[k].task) for k in together if k >= i]
        earliest = min(arrivals[place] for place in places)
        own = record.stage, record.task
        for place in places:
            if arrivals[place] < arrivals[own]:
                arrivals[place] = max(arrivals[place], earliest + AFTERWARDS)
        arrivals[own] = earliest


def _arrives(trace: StepTrace, record: TaskRecord) -> bool:
    """Whether its input comes from another stage."""
    sender = trace.sender(record)
    return sender is not None and sender.stage != record.stage
