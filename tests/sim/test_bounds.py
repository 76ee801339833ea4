"""No schedule beats the lower bound, BF keeps to the paper's upper bound, and both are worth something."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.hints import BF, BFW
from rrfp_jax.core.orders import ZBH1, ZBH2, GPipe, OneFOneB
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import WEIGHT, Placement
from rrfp_jax.sim.bounds import lower_bound, one_machine, operations
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts, constant
from tests.support.drain import Drain
from tests.support.steps import steps

ROUNDING = 1 + 1e-9


def one_chunk(workload, schedule, **options):
    placement = Placement(workload.stages)
    rules = StepRules(placement=placement, microbatches=workload.microbatches, schedule=schedule, **options)
    return rules, WorkloadCosts(workload, placement)


def pipelined(durations):
    """The makespan of a pipeline in one direction, `durations[i][j]` at its i-th place, by microbatch."""
    ends = [0.0] * len(durations[0])
    for row in durations:
        free = 0.0
        for j, duration in enumerate(row):
            free = ends[j] = max(free, ends[j]) + duration
    return ends[-1]


def theorem(forward, backward):
    """The right-hand side of Theorem 6.1 of arXiv:2605.18750."""
    late = [max(column) - column[-1] for column in zip(*forward, strict=True)]
    late_back = [max(column) - column[-1] for column in zip(*backward, strict=True)]
    return pipelined(forward) + pipelined(backward[::-1]) + sum(late[1:]) + sum(late_back[:-1])


@st.composite
def tables(draw):
    """Forward and backward durations of up to 8 stages and 24 microbatches."""
    stages, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    seeded, spread = random.Random(draw(st.integers(0, 10**6))), draw(st.sampled_from([0.0, 0.3, 1.0, 2.0]))
    time = draw(st.sampled_from([lambda: seeded.lognormvariate(0.0, spread), lambda: seeded.randrange(4)]))
    return [[[time() for _ in range(microbatches)] for _ in range(stages)] for _ in "FB"]


def without_transfers(forward, backward):
    zeros = tuple((0.0,) * len(forward[0]) for _ in forward)
    return Workload(tuple(map(tuple, forward)), tuple(map(tuple, backward)), zeros, zeros, zeros)


def bf(forward, backward):
    return simulate(*one_chunk(without_transfers(forward, backward), BF(), accumulation="arrival")).makespan


@given(tables())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_theorem_6_1(durations):
    assert bf(*durations) <= theorem(*durations) * ROUNDING


def test_theorem_6_1_needs_its_corrections():
    forward = [[5.0, 9.0, 9.0], [0.0, 5.0, 9.0], [0.0, 2.0, 5.0]]
    backward = [[9.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 9.0]]
    without = pipelined(forward) + pipelined(backward[::-1])
    assert without < bf(forward, backward) <= theorem(forward, backward)


@given(
    st.one_of(steps(), steps(stages=8, microbatches=24, forwards=200)),
    st.sampled_from(["parallel", "serial", "synchronous"]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_nothing_beats_the_lower_bound(step, links):
    rules, costs = step
    makespan = simulate(rules, costs, links=links).makespan
    bound = lower_bound(rules, costs)
    assert lower_bound(rules, costs, any_split=True) <= bound * ROUNDING
    assert bound <= makespan * ROUNDING


@given(steps(), st.lists(st.integers(1, 9), min_size=6, max_size=6), st.floats(1.0, 3.0))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_nothing_beats_the_bound_of_a_budget(step, costs_in_bytes, room):
    rules, costs = step
    in_bytes = costs_in_bytes[: rules.microbatches]
    chunks = rules.placement.chunks
    limit = round(max(in_bytes) * chunks * room)
    budgets = [Budget([in_bytes] * chunks, limit)] * rules.placement.stages
    makespan = simulate(rules, costs, budgets=budgets).makespan
    assert lower_bound(rules, costs, budgets=budgets) <= makespan * ROUNDING


def late_weights(rules, costs):
    """The one-machine bound with a mistake: as if a gradient could leave only after its W."""
    found = operations(rules, costs)
    for o in found:
        if o.task.kind is WEIGHT:
            o.tail = o.follows.tail - o.duration
    by_stage = [[o for o in found if o.stage == stage] for stage in range(rules.placement.stages)]
    return max(one_machine((o.head, o.duration, o.tail) for o in stage) for stage in by_stage)


def test_a_wrong_bound_is_beaten():
    step = one_chunk(constant(4, 8, 1.0), ZBH1())
    assert lower_bound(*step) == simulate(*step).makespan < late_weights(*step)


def work(workload):
    """The paper's bound: the work of any stage."""
    tables = (workload.forward, workload.backward_input, workload.backward_weight)
    return max(sum(map(sum, rows)) for rows in zip(*tables, strict=True))


@pytest.mark.parametrize(
    ("workload", "schedule"),
    [
        (constant(1, 5, 1.0), GPipe()),
        (constant(4, 8, 1.0), OneFOneB()),
        (constant(4, 8, 1.0, backward_ratio=1.0, transfer=0.0), OneFOneB()),
        (constant(4, 2, 1.0), OneFOneB()),
        (constant(4, 1, 1.0, transfer=0.25), OneFOneB()),
        (constant(4, 8, 1.0), ZBH2()),
        (constant(4, 8, 1.0), BFW()),
    ],
)
def test_the_bound_is_reached(workload, schedule):
    step = one_chunk(workload, schedule)
    assert lower_bound(*step) == pytest.approx(simulate(*step).makespan)
    assert lower_bound(*step) >= work(workload)


def test_the_bound_of_one_microbatch_at_a_time_is_reached():
    rules, costs = one_chunk(constant(4, 5, 1.0, transfer=0.25), BF(), limit=1)
    assert (
        lower_bound(rules, costs) == pytest.approx(simulate(rules, costs).makespan) == 5 * (4 * 3 + 6 * 0.25)
    )
    budgets = [Budget([[7] * 5], 13)] * 4
    unlimited = dataclasses.replace(rules, limit=None)
    assert lower_bound(unlimited, costs, budgets=budgets) == pytest.approx(lower_bound(rules, costs))
    assert lower_bound(unlimited, costs) < lower_bound(rules, costs)


def test_limits_are_not_those_of_fixed_orders():
    rules, costs = one_chunk(constant(4, 8, 1.0), OneFOneB(), limit=1)
    assert lower_bound(rules, costs, budgets=[Budget([[1] * 8], 1)] * 4) == simulate(rules, costs).makespan


def test_the_drain_may_exceed_its_limit_so_that_bounds_nothing():
    rules, costs = one_chunk(constant(3, 6, 1.0), BFW(), limit=1)
    drains = dataclasses.replace(rules, schedule=Drain(BFW(), 1), limit=None)
    unlimited = dataclasses.replace(rules, limit=None)
    assert lower_bound(drains, costs) == lower_bound(unlimited, costs) < lower_bound(rules, costs)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_jackson_in_steps_of_one(jobs):
    """The same schedule by brute force: in every unit of time the job with the longest tail."""
    left, now, length = [list(job) for job in jobs], 0, 0
    while left:
        ready = [job for job in left if job[0] <= now]
        job = max(ready, key=lambda job: job[2], default=None)
        if job is not None and job[1] == 0:
            length = max(length, now + job[2])
            left.remove(job)
            continue
        now += 1
        if job is not None:
            job[1] -= 1
            if job[1] == 0:
                length = max(length, now + job[2])
                left.remove(job)
    assert one_machine(jobs) == length
