"""What the stages of a step held: traces written by hand, and simulated ones."""

import pytest

from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Task
from rrfp_jax.studies.families import FAMILIES
from rrfp_jax.trace.records import peak_bytes, peak_in_flight
from tests.support.small_step import record, simulated, trace_of

F0, F1, B0, B1 = (Task(kind, 0, j) for kind in (FORWARD, BACKWARD) for j in (0, 1))


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
def test_what_simulated_steps_hold(name, family):
    trace, step, fixed = simulated(name, family)
    peaks = peak_in_flight(trace)
    held = peak_bytes(trace, step.actual.activation_bytes)
    assert all(0 < most <= (8 if fixed else 5) for most in peaks)
    largest = max(map(max, step.actual.activation_bytes))
    assert all(0 < size <= most * largest for size, most in zip(held, peaks, strict=True))
