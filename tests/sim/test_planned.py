"""Planned orders: what the search finds, that it keeps to the rules, and that it can be followed."""

import dataclasses

import pytest
from hypothesis import given, settings

from rrfp_jax.core.orders import GPipe, OneFOneB
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import WEIGHT, Placement
from rrfp_jax.sim.bounds import lower_bound
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.planned import plan
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from tests.support.optimum import optimum
from tests.support.steps import Drawn, peak, steps

FUSED = {name: NAMED[name] for name in ("bf", "b-priority", "1f1b", "gpipe")}


def varied(stages, microbatches, **options):
    """A step of log-normal durations, by the rules of the product unless said otherwise."""
    workload = log_normal(stages, microbatches, forward=1.0, sigma=0.3, shared=0.5, seed=0)
    placement = Placement(stages)
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=GPipe(), **options)
    return rules, WorkloadCosts(workload, placement)


def best_candidate(planned):
    return min(span for span in planned.candidates.values() if not isinstance(span, str))


def followed(rules, costs, planned, **options):
    return simulate(dataclasses.replace(rules, schedule=planned.order), costs, **options)


@pytest.mark.slow
@given(steps(stages=3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_plan_is_followed_as_predicted(step):
    rules, costs = step
    planned = plan(rules, costs, evaluations=30)
    trace = followed(rules, costs, planned)
    assert [trace.order(stage) for stage in range(trace.stages)] == list(map(list, planned.order.rows))
    assert trace.makespan == planned.makespan
    assert lower_bound(rules, costs, any_split=True) <= planned.makespan * (1 + 1e-9)
    assert planned.makespan <= best_candidate(planned)
    assert plan(rules, costs, evaluations=30) == planned


@pytest.mark.parametrize("links", ["serial", "synchronous"])
def test_a_plan_for_other_links(links):
    rules, _ = varied(3, 6)
    costs = Drawn(rules.placement, 1)
    planned = plan(rules, costs, evaluations=40, links=links)
    assert followed(rules, costs, planned, links=links).makespan == planned.makespan


@pytest.mark.parametrize("accumulation", ["index", "arrival"])
@pytest.mark.parametrize("limit", [4, 32])
def test_the_search_gains(limit, accumulation):
    rules, costs = varied(4, 12, limit=limit, accumulation=accumulation)
    planned = plan(rules, costs, candidates=FUSED)
    assert planned.evaluations == 200
    assert planned.makespan < 0.97 * best_candidate(planned)
    assert max(map(peak, planned.order.rows)) <= limit
    assert not any(task.kind is WEIGHT for row in planned.order.rows for task in row)


def test_a_plan_keeps_to_a_budget():
    rules, costs = varied(4, 12)
    in_bytes = [3 + 2 * (j % 3) for j in range(12)]
    planned = plan(rules, costs, budgets=[Budget([in_bytes], 15)] * 4, evaluations=60)
    for row in planned.order.rows:
        held = 0
        for kind, _, j in row:
            held += in_bytes[j] * {"F": 1, "I": 0, "B": -1, "W": -1}[kind.letter]
            assert held <= 15
    assert any("limit" in str(why) for why in planned.candidates.values())


def test_little_is_left_to_gain_in_a_tiny_step():
    rules, costs = varied(3, 4, accumulation="arrival")
    planned = plan(rules, costs, candidates=FUSED)
    assert 1 - 1e-9 <= planned.makespan / optimum(rules, costs).makespan <= 1.02


def test_refused_candidates_are_named():
    rules, costs = varied(4, 8, limit=2)
    planned = plan(rules, costs, evaluations=0)
    assert planned.candidates["zb-v"].startswith("ZB-V is defined for 2 chunks a stage, got 1")
    assert planned.candidates["1f1b"] == "exceeds the limit in flight on stage 0"
    assert planned.evaluations == len(
        [span for span in planned.candidates.values() if isinstance(span, float)]
    )
    with pytest.raises(ValueError, match="no candidate for a plan: 1f1b: exceeds the limit"):
        plan(rules, costs, candidates={"1f1b": OneFOneB()})


def test_other_seeds_other_plans():
    rules, costs = varied(4, 8)
    assert len({plan(rules, costs, evaluations=60, seed=seed).order for seed in range(3)}) > 1


def test_one_microbatch():
    rules, costs = varied(2, 1)
    planned = plan(rules, costs, evaluations=30)
    assert planned.makespan == pytest.approx(lower_bound(rules, costs, any_split=True))
