"""Why a stage's device did nothing: every idle second of a step, with its cause; from any trace.

While a stage's device is idle nothing is dispatched on it. So what it may run changes by arrivals only, and
three times split every gap between two tasks:

    |---- nothing is ready ----|---- something is ready ----|---- the gap's last task is ready ----|
     STAGE, LINK, then INJECTED  ORDER, MEMORY, TURN, ESTIMATE        GROUP, then HOST

The first is split once more, where the task ended whose output was awaited: until then that task's stage is
waited for, afterwards the link. If a delay was injected there, the end of it is that delay. Why something
ready did not run is what the core said at the time (`TaskRecord.held`). Simulated steps and older files lack
that; there the kind of the first ready task tells. Where the gap's last task was dispatched before its input
came (core/foresight.py), though others were ready, what follows its dispatch is a wrong estimate. The gaps
before a stage's first task and after its last are the step's own (BEGIN, END): a pipeline has to be filled
and drained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import accumulate
from math import inf
from operator import truediv
from statistics import fmean
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.tasks import KINDS, Task
from rrfp_jax.trace.records import StepTrace, TaskRecord


class Cause(StrEnum):
    """Why a device is idle; `report/legend.py` says how each is told and shown."""

    BEGIN = "begin"  # nothing has reached the stage yet
    STAGE = "stage"  # nothing is ready: another stage's task has not ended
    LINK = "link"  # nothing is ready: an output is on its way
    INJECTED = "injected"  # nothing is ready: a delay was injected into an output's way
    ORDER = "order"  # something is ready, but a fixed order waits for another task
    MEMORY = "memory"  # a forward is ready, but a limit holds it back
    TURN = "turn"  # a backward is ready, but the order of accumulation holds it back
    ESTIMATE = "estimate"  # a task is ready, but one whose input was expected earlier is queued before it
    GROUP = "group"  # a task is ready, but the processes of the stage have not agreed on it
    HOST = "host"  # a task is ready, but the host has not brought it to the device
    END = "end"  # nothing is left to do


HELD: Mapping[WaitCause | None, Cause] = {
    WaitCause.ORDER: Cause.ORDER,
    WaitCause.ROOM: Cause.MEMORY,
    WaitCause.RESERVED: Cause.MEMORY,
    WaitCause.TURN: Cause.TURN,
    **dict.fromkeys((WaitCause.LEADER, WaitCause.CHOSEN, WaitCause.PROPOSALS), Cause.GROUP),
}
"""What the core said that a stage waited for while something was ready, as a cause of idleness.

A cause that is not here counts as none: what was ready tells (`_gap`). Nor does it count once the task
that ends the gap is ready: then it is the host's or the group's time.
"""


Firsts: TypeAlias = Mapping[Cause | None, TaskRecord]
"""What was ready first of all tasks (None), and of those that a cause holds back."""


class Idle(NamedTuple):
    """A time in which a stage did nothing (s); `awaited` ended it, which needed the output of `source`."""

    stage: int
    start: float
    end: float
    cause: Cause
    awaited: Task | None = None
    source: tuple[int, Task] | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


StageTimes: TypeAlias = dict[str, float]
"""What one stage did with the makespan (s): "compute", "delayed" where injected delays kept it busy, and idle
times by cause."""


def idleness(trace: StepTrace, fixed_order: bool, grouped: bool = False) -> list[Idle]:
    """All idle times of a step, stage by stage; `grouped` if processes share a stage and agree on tasks."""
    return [idle for stage in range(trace.stages) for idle in _of_stage(trace, stage, fixed_order, grouped)]


def stage_times(trace: StepTrace, fixed_order: bool, grouped: bool = False) -> list[StageTimes]:
    """How each stage spent the step; arguments as for `idleness`."""
    delayed = [trace.delayed(stage) for stage in range(trace.stages)]
    busy = [{"compute": trace.busy(s) - own, "delayed": own} for s, own in enumerate(delayed)]
    found: list[StageTimes] = [own | dict.fromkeys(Cause, 0.0) for own in busy]
    for idle in idleness(trace, fixed_order, grouped):
        found[idle.stage][idle.cause] += idle.seconds
    return found


def shares(times: Sequence[StageTimes]) -> dict[str, float]:
    """The mean share of the step of what stages did, by the names in `StageTimes`; they add to 1."""
    wholes = [sum(own.values()) or 1.0 for own in times]
    share = {name: fmean(map(truediv, (t[name] for t in times), wholes)) for name in ("delayed", *Cause)}
    share["compute"] = 1.0 - sum(share.values())
    return share


def _of_stage(trace: StepTrace, stage: int, fixed_order: bool, grouped: bool) -> Iterator[Idle]:
    records = [*_once_ready(trace, stage)]
    ready_first = {  # of each record and those after it
        cause: [*accumulate(reversed(records), partial(_first_ready, cause))][::-1]
        for cause in (None, Cause.MEMORY, Cause.TURN)
    }
    idle_since = trace.start
    for number, record in enumerate(records):
        if record.start > idle_since:
            firsts = {cause: found[number] for cause, found in ready_first.items()}
            for idle in _gap(trace, idle_since, record, firsts, fixed_order, grouped):
                if idle.end > idle.start:
                    own = number == 0 and idle.cause in (Cause.STAGE, Cause.LINK)
                    yield idle._replace(cause=Cause.BEGIN) if own else idle
        idle_since = max(idle_since, record.end)
    if trace.end > idle_since:
        yield Idle(stage, idle_since, trace.end, Cause.END)


def _once_ready(trace: StepTrace, stage: int) -> Iterator[TaskRecord]:
    """A stage's records: what follows from a task dispatched before its input came is not ready before."""
    ready = dict[tuple[int, int], float]()
    for record in trace.stage_records(stage):
        sender, own = trace.sender(record), record.task[1:]
        before = ready.get(own if sender is None else sender.task[1:], -inf)
        ready[own] = max(record.ready, before)
        yield record._replace(ready=ready[own])


def _gap(
    trace: StepTrace, start: float, last: TaskRecord, firsts: Firsts, fixed_order: bool, grouped: bool
) -> list[Idle]:
    """The parts of a gap, some empty, that `last` ended; `firsts` were ready first of all that followed."""
    first = firsts[None]

    def within(time: float) -> float:
        return min(max(time, start), last.start)

    own = within(last.ready)
    any_ready = min(within(first.ready), own)
    chosen = within(max(last.dispatched, own)) if grouped else own
    source, awaited = trace.sender(first), trace.sender(last)
    left = any_ready if source is None else min(within(source.end), any_ready)
    on_time = max(min(within(first.ready - first.late), any_ready), left)
    held = HELD.get(last.held, Cause.ORDER if fixed_order else _held_back(first))
    foreseen = last.dispatched < last.ready and not fixed_order and last.held not in HELD
    queued = max(within(last.dispatched), any_ready) if foreseen else own
    held_by = (last, awaited) if fixed_order else (firsts.get(held, first), None)
    parts = (
        (start, left, Cause.STAGE, first, source),
        (left, on_time, Cause.LINK, first, source),
        (on_time, any_ready, Cause.INJECTED, first, source),
        (any_ready, queued, held, *held_by),
        (queued, own, Cause.ESTIMATE, last, awaited),
        (own, chosen, Cause.GROUP, last, None),
        (chosen, last.start, Cause.HOST, last, None),
    )
    return [
        Idle(last.stage, begin, end, cause, of.task, None if by is None else (by.stage, by.task))
        for begin, end, cause, of, by in parts
    ]


def _held_back(record: TaskRecord) -> Cause:
    return Cause.MEMORY if KINDS[record.task.kind].charge > 0 else Cause.TURN


def _first_ready(cause: Cause | None, later: TaskRecord, own: TaskRecord) -> TaskRecord:
    return min(own, later, key=lambda record: (_held_back(record) is not cause, record.ready))
