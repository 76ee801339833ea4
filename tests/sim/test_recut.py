"""Another split of a model's layers: which are tried, and what they would take."""

from dataclasses import replace

import pytest

from rrfp_jax.core.step_rules import Budget
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.splits import Layers
from rrfp_jax.sim.what_if import what_ifs
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.replayed import replay_of
from tests.support.spoilt import EVEN, MICROBATCHES, STAGES, Straggler, ran, rules


def blocks(*split):
    """What stages of so many blocks take, beside EVEN's one block a stage."""
    factors = [[float(size)] * MICROBATCHES for size in split]
    return WorkloadCosts(EVEN.scaled(factors, factors), rules().placement)


def with_work(step, *split):
    work = Work([LayerWork("Block", 1.0, 3)] * sum(split), split)
    return replace(step, work=lambda: work)


def savings(step):
    layers = Layers.of([step])
    return {change.change: change.seconds for change in what_ifs(step, schedules=(), layers=layers).changes}


def test_the_best_split_and_one_layer_moved_take_what_they_take():
    found = savings(with_work(ran(blocks(2, 4, 1, 1)), 2, 4, 1, 1))
    best, moved = simulate(rules(), blocks(2, 2, 2, 2)), simulate(rules(), blocks(2, 3, 2, 1))
    assert found["split 2,2,2,2 instead of 2,4,1,1"] == pytest.approx(best.makespan)
    assert found["layer 5 (Block) on stage 2 instead of 1"] == pytest.approx(moved.makespan)
    assert "layer 2 (Block) on stage 0 instead of 1" in found


def test_a_slow_stage_gets_fewer_layers():
    slow = Straggler(blocks(4, 4, 4, 4), stage=2, factor=2.0)
    step = with_work(ran(slow), 4, 4, 4, 4)
    (best, *_) = Layers.of([step]).recuts()
    assert best.split == (5, 4, 2, 5) or max(best.split[s] * (2 if s == 2 else 1) for s in range(4)) == 5
    split = blocks(*best.split)
    real = simulate(rules(), Straggler(split, stage=2, factor=2.0)).makespan
    assert savings(step)[best.change] == pytest.approx(real)


def test_a_split_that_is_one_layer_moved_is_tried_once():
    found = list(Layers.of([with_work(ran(blocks(2, 3, 1, 2)), 2, 3, 1, 2)]).recuts())
    assert [(recut.moved, recut.split) for recut in found] == [(2, (3, 2, 1, 2)), (4, (2, 2, 2, 2))]


def test_nothing_to_move_where_stages_have_one_layer():
    assert not list(Layers.of([with_work(ran(blocks(1, 1, 1, 1)), 1, 1, 1, 1)]).recuts())


def test_bytes_go_with_the_layers():
    budgets = [Budget([[10 * size] * MICROBATCHES], 100) for size in (2, 4, 1, 1)]
    step = with_work(ran(blocks(2, 4, 1, 1), limit=None, budgets=budgets), 2, 4, 1, 1)
    layers = Layers.of([step])
    _, other = layers.recut(step, replay_of(step.trace).costs, (2, 2, 2, 2))
    assert [budget.costs[0][0] for budget in other.budgets] == [20] * STAGES
    assert [budget.limit for budget in other.budgets] == [100] * STAGES


def test_nothing_is_known_without_work():
    assert Layers.of([ran(blocks(1, 1, 1, 1))]) is None
