"""The exact optimum against brute force, and between the lower bound and all policies."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given, settings

from rrfp_jax.core.hints import BF, Ranked
from rrfp_jax.core.orders import ZBH1, OneFOneB
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.sim.bounds import lower_bound
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import WorkloadCosts, constant
from tests.support.optimum import optimum
from tests.support.steps import Drawn, peak, steps

ROUNDING = 1 + 1e-9
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
    assert lower_bound(rules, costs) <= best * ROUNDING
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
    assert optimum(step, costs).makespan == simulate(step, costs).makespan == lower_bound(step, costs)


def test_gives_up():
    step = rules(4, 4, BF())
    with pytest.raises(ValueError, match=r"optimum of 32 tasks takes more than 500 partial schedules"):
        optimum(step, Drawn(step.placement, 0), most=500)
