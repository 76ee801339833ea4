"""Where the time of a step went on each stage, and what it held; from any trace, real or simulated.

While a stage's device is idle nothing is dispatched on it, so what it may run changes by arrivals only. Two
times split every gap between two tasks: when the first task became ready that had not run yet, and when the
task became ready that ended the gap.

    stall      nothing was ready
    blocked    something was ready, but a fixed order waited for another task
    held       something was ready, but a limit or the order of accumulation held it back
    launch     the task that ended the gap was ready: the host's time until its device began
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.core.measure.trace import StepTrace, TaskRecord
from rrfp_jax.core.tasks import FORWARD, INPUT, Task


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What one stage did with the makespan: seconds that add up to it."""

    compute: float
    stall: float
    blocked: float
    held: float
    launch: float


def stage_times(trace: StepTrace, fixed_order: bool) -> list[StageTime]:
    """How each stage spent the step; `fixed_order` says whether the schedule was one, or a hint."""
    return [_stage_time(trace, stage, fixed_order) for stage in range(trace.stages)]


def _stage_time(trace: StepTrace, stage: int, fixed_order: bool) -> StageTime:
    records = trace.stage_records(stage)
    earliest = _earliest_ready(records)
    stall = waiting = launch = 0.0
    idle_since = trace.start
    for number, record in enumerate(records):
        if record.start > idle_since:
            own = min(max(record.ready, idle_since), record.start)
            any_ready = min(max(earliest[number], idle_since), own)
            stall += any_ready - idle_since
            waiting += own - any_ready
            launch += record.start - own
        idle_since = max(idle_since, record.end)
    return StageTime(
        compute=trace.busy(stage),
        stall=stall + trace.end - idle_since,
        blocked=waiting if fixed_order else 0.0,
        held=0.0 if fixed_order else waiting,
        launch=launch,
    )


def _earliest_ready(records: Sequence[TaskRecord]) -> list[float]:
    """For each record the earliest time at which it or a later one was ready."""
    earliest = [record.ready for record in records]
    for at in range(len(earliest) - 2, -1, -1):
        earliest[at] = min(earliest[at], earliest[at + 1])
    return earliest


def peak_in_flight(trace: StepTrace) -> list[int]:
    """Per stage, the most microbatches between the dispatches of their first F and last releasing task."""
    orders = [[record.task for record in _by_dispatch(trace, stage)] for stage in range(trace.stages)]
    return [peak_of_order(order, trace.placement.chunks) for order in orders]


def peak_charge(order: Iterable[Task], costs: Sequence[Sequence[int]]) -> int:
    """The most that a stage's tasks, in this order, are charged at once.

    Args:
        order: of a step with backward.
        costs: `[chunk][microbatch]`, of each chunk from its F to its B or W.
    """
    held = peak = 0
    for kind, chunk, microbatch in order:
        if kind is FORWARD:
            held += costs[chunk][microbatch]
            peak = max(peak, held)
        elif kind is not INPUT:
            held -= costs[chunk][microbatch]
    return peak


def peak_of_order(order: Iterable[Task], chunks: int) -> int:
    """The most microbatches that are begun and not yet released at once.

    Args:
        order: of a stage, in a step with backward.
        chunks: of the stage.
    """
    held = peak = 0
    to_go: dict[int, int] = {}  # releasing tasks, by microbatch
    for kind, _, microbatch in order:
        if kind is FORWARD and microbatch not in to_go:
            to_go[microbatch] = chunks
            held += 1
            peak = max(peak, held)
        elif kind is not FORWARD and kind is not INPUT:
            to_go[microbatch] -= 1
            held -= to_go[microbatch] == 0
    return peak


def peak_bytes(trace: StepTrace, activation_bytes: Sequence[Sequence[float]]) -> list[float]:
    """Per stage, the most that it held at once.

    Args:
        trace: of a step with backward.
        activation_bytes: `[stage][microbatch]`, shared equally by the stage's chunks; each chunk's part is
            held from the dispatch of its F to that of its B or W.
    """
    peaks = []
    for stage in range(trace.stages):
        share = [size / trace.placement.chunks for size in activation_bytes[stage]]
        held = peak = 0.0
        for record in _by_dispatch(trace, stage):
            kind, _, microbatch = record.task
            if kind is FORWARD:
                held += share[microbatch]
                peak = max(peak, held)
            elif kind is not INPUT:
                held -= share[microbatch]
        peaks.append(peak)
    return peaks


def _by_dispatch(trace: StepTrace, stage: int) -> list[TaskRecord]:
    return sorted(trace.stage_records(stage), key=lambda record: record.dispatched)
