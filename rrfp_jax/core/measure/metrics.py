"""What the stages of a step held; from any trace, real or simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rrfp_jax.core.measure.trace import StepTrace, TaskRecord
from rrfp_jax.core.tasks import FORWARD, INPUT, Task


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
