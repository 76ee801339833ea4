"""Where a step's time went and what it held: traces written by hand, and simulated ones."""

from dataclasses import astuple

import pytest

from rrfp_jax.core.measure.costs import WorkloadCosts
from rrfp_jax.core.measure.metrics import peak_bytes, peak_in_flight, stage_times
from rrfp_jax.core.measure.trace import Part, StepTrace, TaskRecord
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import NAMED, by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.families import FAMILIES


def record(task, ready, dispatched, start, end, stage=0):
    return TaskRecord(stage, task, 0, ready, dispatched, start, end)


def trace_of(*records, stages=1, chunks=1):
    return StepTrace(0, Placement(stages, chunks), [Part.of(records)])


F0, F1, B0, B1 = (Task(kind, 0, j) for kind in (FORWARD, BACKWARD) for j in (0, 1))

GAPS = trace_of(
    record(F0, 0.0, 0.0, 0.0, 1.0),
    record(B0, 4.0, 4.5, 5.0, 6.0),  # nothing ready from 1 to 3, F1 ready but not run until 4, host until 5
    record(F1, 3.0, 6.0, 6.0, 8.0),
    record(F0, 0.0, 0.0, 0.0, 9.0, stage=1),
    stages=2,
)


@pytest.mark.parametrize(("fixed", "blocked", "held"), [(True, 1.0, 0.0), (False, 0.0, 1.0)])
def test_a_gap_is_split_at_what_became_ready(fixed, blocked, held):
    first, second = stage_times(GAPS, fixed)
    assert astuple(first) == (4.0, 3.0, blocked, held, 1.0)  # it stalls at the end, too
    assert astuple(second) == (9.0, 0.0, 0.0, 0.0, 0.0)


def test_a_task_queued_ahead_leaves_no_gap():
    (time,) = stage_times(trace_of(record(F0, 0, 0, 0, 1), record(F1, 0, 0.9, 1, 2)), fixed_order=False)
    assert astuple(time) == (2.0, 0.0, 0.0, 0.0, 0.0)


def test_what_is_in_flight_leaves_at_the_last_releasing_task():
    i0, w0 = Task(INPUT, 0, 0), Task(WEIGHT, 0, 0)
    tasks = [F0, i0, F1, w0, B1]
    trace = trace_of(*(record(task, n, n, n, n + 1) for n, task in enumerate(tasks)))
    assert peak_in_flight(trace) == [2]
    assert peak_bytes(trace, [[10.0, 7.0]]) == [17.0]


def test_chunks_share_a_microbatch():
    f, b = Task(FORWARD, 1, 0), Task(BACKWARD, 1, 0)
    tasks = [F0, f, b, F1, B0, Task(FORWARD, 1, 1), Task(BACKWARD, 1, 1), B1]
    trace = trace_of(*(record(task, n, n, n, n + 1) for n, task in enumerate(tasks)), chunks=2)
    assert peak_in_flight(trace) == [2]  # F1 comes before B0 has released microbatch 0
    assert peak_bytes(trace, [[10.0, 6.0]]) == [10.0]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("family", FAMILIES)
def test_simulated_steps_add_up(name, family):
    step, schedule = FAMILIES[family](4, 8, seed=3), by_name(name)
    placement = schedule.placement_for(4)
    rules = StepRules(placement=placement, microbatches=8, schedule=schedule, limit=5)
    trace = simulate(rules, WorkloadCosts(step.actual, placement))
    fixed = isinstance(schedule, FixedOrder)
    for time in stage_times(trace, fixed):
        assert sum(astuple(time)) == pytest.approx(trace.makespan)
        assert min(astuple(time)) >= 0 and time.launch == 0
        assert time.compute > 0 and not (time.held if fixed else time.blocked)
    peaks = peak_in_flight(trace)
    held = peak_bytes(trace, step.actual.activation_bytes)
    assert all(0 < most <= (8 if fixed else 5) for most in peaks)
    largest = max(map(max, step.actual.activation_bytes))
    assert all(0 < size <= most * largest for size, most in zip(held, peaks, strict=True))
