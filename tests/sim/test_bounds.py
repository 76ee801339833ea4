"""Bounds and the exact optimum: neither is beaten by any schedule."""

import dataclasses
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.hints import BF, BFW, Ranked
from rrfp_jax.core.orders import ZBH1, ZBH2, GPipe, OneFOneB
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.bounds import lower_bound, one_machine
from rrfp_jax.trace.costs import Workload, WorkloadCosts, constant
from tests.support.drain import Drain
from tests.support.limits import bound_within, operations
from tests.support.optimum import optimum
from tests.support.steps import Drawn, peak, steps

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
    bound = bound_within(rules, costs)
    assert lower_bound(rules, costs) <= bound * ROUNDING
    assert bound <= makespan * ROUNDING


@dataclasses.dataclass(frozen=True)
class SplitEverywhere(BF):
    """Every backward in two parts."""

    def split(self, stage, placement, microbatches):
        return {*product(range(placement.chunks), range(microbatches))}


@given(steps(), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_lower_bound_is_that_of_the_operations_with_everything_split(step, forward_only):
    rules, costs = step
    rules = dataclasses.replace(rules, schedule=SplitEverywhere(), limit=None, forward_only=forward_only)
    assert lower_bound(rules, costs) == bound_within(rules, costs)


@given(steps(), st.lists(st.integers(1, 9), min_size=6, max_size=6), st.floats(1.0, 3.0))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_nothing_beats_the_bound_of_a_budget(step, costs_in_bytes, room):
    rules, costs = step
    in_bytes = costs_in_bytes[: rules.microbatches]
    chunks = rules.placement.chunks
    limit = round(max(in_bytes) * chunks * room)
    budgets = [Budget([in_bytes] * chunks, limit)] * rules.placement.stages
    makespan = simulate(rules, costs, budgets=budgets).makespan
    assert bound_within(rules, costs, budgets=budgets) <= makespan * ROUNDING


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
    assert bound_within(*step) == simulate(*step).makespan < late_weights(*step)


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
    assert bound_within(*step) == pytest.approx(simulate(*step).makespan)
    assert bound_within(*step) >= work(workload)


def test_the_bound_of_one_microbatch_at_a_time_is_reached():
    rules, costs = one_chunk(constant(4, 5, 1.0, transfer=0.25), BF(), limit=1)
    assert (
        bound_within(rules, costs) == pytest.approx(simulate(rules, costs).makespan) == 5 * (4 * 3 + 6 * 0.25)
    )
    budgets = [Budget([[7] * 5], 13)] * 4
    unlimited = dataclasses.replace(rules, limit=None)
    assert bound_within(unlimited, costs, budgets=budgets) == pytest.approx(bound_within(rules, costs))
    assert bound_within(unlimited, costs) < bound_within(rules, costs)


def test_limits_are_not_those_of_fixed_orders():
    rules, costs = one_chunk(constant(4, 8, 1.0), OneFOneB(), limit=1)
    assert bound_within(rules, costs, budgets=[Budget([[1] * 8], 1)] * 4) == simulate(rules, costs).makespan


def test_the_drain_may_exceed_its_limit_so_that_bounds_nothing():
    rules, costs = one_chunk(constant(3, 6, 1.0), BFW(), limit=1)
    drains = dataclasses.replace(rules, schedule=Drain(BFW(), 1), limit=None)
    unlimited = dataclasses.replace(rules, limit=None)
    assert bound_within(drains, costs) == bound_within(unlimited, costs) < bound_within(rules, costs)


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


FUSED, SPLIT = (FORWARD, BACKWARD), (FORWARD, INPUT, WEIGHT)


def rules(placement, microbatches, schedule, **options):
    placement = placement if isinstance(placement, Placement) else Placement(placement)
    return StepRules(
        placement=placement, microbatches=microbatches, schedule=schedule, accumulation="arrival", **options
    )


def interleavings(chains):
    """All orders of the tasks of several chains."""
    if not any(chains):
        yield []
    for at, chain in enumerate(chains):
        if chain:
            for rest in interleavings([*chains[:at], chain[1:], *chains[at + 1 :]]):
                yield [chain[0], *rest]


def brute_force(layout, microbatches, split, costs, limit=None):
    """The shortest makespan of all orders; `layout` is the (stage, chunk) of each virtual stage."""
    stages, kinds = range(1 + max(stage for stage, _ in layout)), SPLIT if split else FUSED
    last = len(layout) - 1

    def chain(stage, j):
        chunks = [chunk for at, chunk in layout if at == stage]
        forward = [Task(FORWARD, chunk, j) for chunk in chunks]
        return forward + [Task(kind, chunk, j) for chunk in reversed(chunks) for kind in kinds[1:]]

    def arrival(ends, stage, task):
        """When the task's input is there; None if nobody knows yet."""
        v = layout.index((stage, task.chunk))
        if task.kind is FORWARD and v == 0:
            return 0.0
        if task.kind is WEIGHT:
            source = v, INPUT
        elif task.kind is FORWARD:
            source = v - 1, FORWARD
        else:
            source = (v, FORWARD) if v == last else (v + 1, task.kind)
        sender, chunk = layout[source[0]]
        output = Task(source[1], chunk, task.microbatch)
        if (sender, output) not in ends:
            return None
        return ends[sender, output] + (costs.transfer(sender, output) if sender != stage else 0.0)

    def makespan(orders):
        ends, left, free = {}, [list(order) for order in orders], [0.0] * len(orders)
        while any(left):
            moves = [(s, arrival(ends, s, tasks[0])) for s, tasks in enumerate(left) if tasks]
            stage, ready = next((move for move in moves if move[1] is not None), (None, None))
            if stage is None:
                return float("inf")
            task = left[stage].pop(0)
            ends[stage, task] = free[stage] = max(free[stage], ready) + costs.duration(stage, task)
        return max(free)

    chains = [[chain(stage, j) for j in range(microbatches)] for stage in stages]
    orders = [[o for o in interleavings(c) if limit is None or peak(o) <= limit] for c in chains]
    return min(makespan(choice) for choice in product(*orders))


LOOPED, V = Placement(2, 2), Placement(2, 2, "v")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("placement", "layout", "microbatches", "limit"),
    [
        (Placement(2), [(0, 0), (1, 0)], 3, None),
        (Placement(2), [(0, 0), (1, 0)], 3, 2),
        (Placement(3), [(0, 0), (1, 0), (2, 0)], 2, 1),
        (LOOPED, [(0, 0), (1, 0), (0, 1), (1, 1)], 2, None),
        (V, [(0, 0), (1, 0), (1, 1), (0, 1)], 2, None),
        (V, [(0, 0), (1, 0), (1, 1), (0, 1)], 2, 1),
    ],
)
def test_fused_as_by_brute_force(placement, layout, microbatches, limit, seed):
    costs = Drawn(placement, seed)
    found = optimum(rules(placement, microbatches, BF(), limit=limit), costs)
    assert found.makespan == pytest.approx(brute_force(layout, microbatches, False, costs, limit))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("stages", "limit"), [(2, None), (3, None), (3, 1)])
def test_split_as_by_brute_force(stages, limit, seed):
    costs = Drawn(Placement(stages), seed)
    found = optimum(rules(stages, 2, Ranked(ZBH1()), limit=limit), costs)
    layout = [(stage, 0) for stage in range(stages)]
    assert found.makespan == pytest.approx(brute_force(layout, 2, True, costs, limit))


@given(steps(stages=3, microbatches=4, forwards=9))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_between_the_bound_and_all_policies(step):
    rules, costs = step
    best = optimum(rules, costs).makespan
    assert bound_within(rules, costs) <= best * ROUNDING
    assert best <= simulate(rules, costs).makespan * ROUNDING


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("schedule", ["bf", "bfw"])
def test_its_order_takes_as_long_as_it_says(schedule, limit):
    step = rules(3, 4, NAMED[schedule], limit=limit)
    costs = Drawn(step.placement, 3)
    best = optimum(step, costs)
    assert simulate(dataclasses.replace(step, schedule=best.order), costs).makespan == best.makespan
    assert limit is None or max(map(peak, best.order.rows)) <= limit
    assert best.makespan < simulate(step, costs).makespan


def test_1f1b_is_optimal_if_all_tasks_are_alike():
    step = rules(3, 4, OneFOneB())
    costs = WorkloadCosts(constant(3, 4, 1.0), step.placement)
    assert optimum(step, costs).makespan == simulate(step, costs).makespan == bound_within(step, costs)


def test_gives_up():
    step = rules(4, 4, BF())
    with pytest.raises(ValueError, match=r"optimum of 32 tasks takes more than 500 partial schedules"):
        optimum(step, Drawn(step.placement, 0), most=500)
