"""When layers move: measured steps in, decisions out. Training is in virtual time."""

import copy
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layers import Machine, train
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget
from rrfp_jax.report.what_if import what_ifs
from rrfp_jax.sim import splits as rebalance
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.splits import (
    FIRST,
    GAIN,
    PROMISED,
    TRIED,
    Balance,
    Layers,
    Move,
    Verdict,
    simulated,
)
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.layers import LayerWork, Work, layer_shares
from rrfp_jax.trace.replayed import replay_of
from tests.support.spoilt import EVEN, MICROBATCHES, STAGES, Straggler, ran, rules

ALIKE = (4, 4, 4, 4)


def always(*slowness):
    return lambda step: slowness


def splits(found):
    return [move.split for _, move in found.moves]


def test_a_slow_stage_gives_layers_away_at_the_first_look():
    machine = Machine([0.01] * 16, always(1, 1, 1.5, 1))
    found = train(machine, ALIKE, 40)
    ((step, move),) = found.moves
    assert step == FIRST and sum(move.split) == 16 and move.split[2] < 4
    hindsight = min(machine.step(0, other).trace.makespan for other in every_split(16, 4))
    assert found.seconds[-1] <= 1.03 * hindsight
    (verdict,) = [look.verdict for _, look in found.looks if look.verdict]
    assert verdict.kept and verdict.gain == pytest.approx(move.gain, abs=0.02)


def every_split(layers, stages):
    if stages == 1:
        return [(layers,)]
    sizes = range(1, layers - stages + 2)
    return [(first, *rest) for first in sizes for rest in every_split(layers - first, stages - 1)]


def test_a_bad_cut_is_mended():
    assert splits(train(Machine([0.01] * 16, always(1, 1, 1, 1)), (2, 4, 8, 2), 40)) == [ALIKE]


@pytest.mark.slow(reason="many simulated runs")
@pytest.mark.parametrize("level", ["J1", "J2", "J3"])
def test_jitter_alone_moves_nothing(level):
    for seed in range(3):
        found = train(Machine([0.01] * 32, always(1, 1, 1, 1), level=level, seed=seed), (8, 8, 8, 8), 40)
        assert not found.moves


def test_what_is_over_is_not_mended():
    """A stage is slow in the earlier half of the steps that are looked at."""
    machine = Machine([0.01] * 16, lambda step: (1, 1, 1.5 if step < FIRST // 2 else 1, 1))
    assert not train(machine, ALIKE, FIRST + 1).moves


def test_a_stage_that_gets_well_again_gets_its_layers_back():
    machine = Machine([0.01] * 16, lambda step: (1, 1, 4 if step < 30 else 1, 1))
    found = train(machine, ALIKE, 150)
    assert len(found.moves) == 2 and splits(found)[0][2] == 1 and splits(found)[-1][2] == 4


def test_moves_teach_that_layers_are_heavy_where_a_stage_seemed_slow():
    machine = Machine([0.01] * 8 + [0.015] * 4 + [0.01] * 4, always(1, 1, 1, 1), estimates=[1] * 16)
    found = train(machine, ALIKE, 60)
    assert splits(found)[-1] == (5, 4, 3, 4)
    (first, second) = [look.verdict for _, look in found.looks if look.verdict]
    assert not first.kept and second.kept


def test_layers_go_back_where_a_move_costs_and_are_never_there_again():
    """A stage is slow unless it is left alone: whatever is predicted of moves is wrong."""
    machine = Machine([0.01] * 16, always(1, 1, 1.5, 1))
    cursed, step = [], machine.step

    def cursed_step(number, split):
        slowness = (1, 1, 1.5, 1) if tuple(split) == ALIKE else (2.5, 1, 1, 2.5)
        cursed.append(tuple(split))
        machine.slowness = always(*slowness)
        return step(number, split)

    machine.step = cursed_step
    found = train(machine, ALIKE, 80)
    assert found.moves[1][1].back and splits(found)[1] == ALIKE
    assert len(set(splits(found)[::2])) == len(splits(found)[::2]), "each is tried once"
    assert len(found.moves) <= 6 and cursed[-1] == ALIKE


def test_a_move_must_pay_in_what_is_left_of_the_run():
    machine = Machine([0.01] * 16, always(1, 1, 1.5, 1))
    assert not train(machine, ALIKE, 24, pause=100.0).moves
    left = [machine.step(number, ALIKE) for number in range(FIRST)], 1000
    assert Balance(100.0).look(*left).move is not None


def test_a_split_that_cannot_be_is_not_proposed_again():
    found = train(Machine([0.01] * 16, always(1, 1, 1.5, 1)), ALIKE, 140, refuse=True)
    proposed = [look.move.split for _, look in found.looks if look.move]
    assert proposed and len(set(proposed)) == len(proposed) and not found.moves


def test_a_recording_that_the_simulator_does_not_repeat_is_not_gone_by():
    machine = Machine([0.01] * 16, always(1, 1, 1.5, 1))
    steps = [machine.step(number, ALIKE) for number in range(FIRST)]
    for at, step in enumerate(steps):
        longer = [step.trace.parts[0]._replace(end=1.5 * step.trace.end)]
        steps[at] = replace(step, trace=replace(step.trace, parts=longer))
    look = Balance(0.1).look(steps, 1000)
    assert look.move is None and look.distrusted > 0.1


def test_nothing_is_decided_where_layers_are_not_known():
    steps = [ran(blocks(2, 4, 1, 1))] * FIRST
    assert Balance(0.1).look(steps, 1000).move is None


def test_weights_take_their_room_along():
    budgets = [Budget([[10 * size] * MICROBATCHES], 60) for size in (2, 4, 1, 1)]
    step = with_work(ran(blocks(2, 4, 1, 1), limit=None, budgets=budgets), 2, 4, 1, 1)
    assert simulated([(step, replay_of(step.trace))], Layers.of([step]), (2, 2, 2, 2)) < step.trace.makespan
    heavy = [LayerWork("Block", 1.0, 3, 45)] * 8
    own = Layers.of([step])
    other = Layers(type(own.work)(heavy, own.work.split), own.shares, own.placement)
    found = simulated([(step, replay_of(step.trace))], other, (2, 2, 2, 2))
    assert found == float("inf"), "two more blocks leave no room for one"


@pytest.fixture
def moved():
    """What decides, with a move that has been made, and that many steps after it, so many times as long as
    those before; these differ by a tenth from one another."""
    slow, balance = Machine([0.01] * 16, always(1, 1, 1.5, 1)), Balance(0.1)

    def steps(split, factor):
        sizes = [factor * (0.9, 1.1)[number % 2] for number in range(FIRST)]
        slow.slowness = lambda step: [sizes[step % FIRST] * own for own in (1, 1, 1.5, 1)]
        return [slow.step(number, split) for number in range(FIRST)]

    move = balance.look(steps(ALIKE, 1.0), 1000).move
    balance.moved(move, 1.0, 0.1)
    return balance, lambda slower: steps(move.split, slower / (1 - move.gain))


def test_layers_go_back_only_where_steps_are_slower_beyond_their_noise(moved):
    balance, after = moved
    look = balance.look(after(1.05), 1000)
    assert look.verdict.gain < 0 and not look.verdict.kept and not (look.move and look.move.back)


def test_the_way_back_must_pay_as_well(moved):
    balance, after = moved
    again = copy.deepcopy(balance)
    assert again.look(after(1.5), 1000).move.back
    look = balance.look(after(1.5), 2)
    assert look.verdict.gain < 0 and look.move is None


OTHERS = {
    "schedule": lambda step: replace(step, rules=replace(step.rules, schedule=by_name("gpipe"))),
    "shapes": lambda step: replace(step, buckets=["longer"] * len(step.buckets)),
    "number of microbatches": lambda step: replace(step, buckets=step.buckets * 2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_move_is_judged_once_there_are_steps_of_the_same_kind(moved, other):
    balance, after = moved
    look = balance.look([other(step) for step in after(1.5)], 1000)
    assert look.verdict is None and not (look.move and look.move.back)
    assert balance.look(after(1.5), 1000).verdict.gain < 0


def test_once_a_stage_does_another_part_of_the_work_old_verdicts_are_forgotten(moved):
    balance, after = moved
    back = balance.look(after(1.5), 1000).move
    balance.moved(back, 0.1, 0.1)
    assert balance._asked > GAIN and balance._barred == {back.before}
    other = Machine([0.01] * 16, always(1, 1, 1, 2))
    balance.look([other.step(number, ALIKE) for number in range(FIRST)], 1000)
    assert balance._asked == GAIN and not balance._barred


def test_what_compiling_took_is_what_it_is_expected_to_take():
    machine = Machine([0.01] * 16, always(1, 1, 1.5, 1))
    balance, steps = Balance(0.1), [machine.step(number, ALIKE) for number in range(FIRST)]
    move = balance.look(steps, 100).move
    balance.moved(move, 0.1, compile_seconds=200 * move.seconds)
    balance.look(steps, 100)
    assert balance.look(steps, 100).move is None and balance.look(steps, 1000).move is not None


def test_of_large_steps_fewer_are_simulated(monkeypatch):
    counts = []

    def counted(steps, layers, split):
        counts.append(len(steps))
        return simulated(steps, layers, split)

    monkeypatch.setattr(rebalance, "simulated", counted)
    machine = Machine([0.01] * 16, always(1, 1, 1.5, 1))
    steps = [machine.step(number, ALIKE) for number in range(FIRST)]
    all_of_them = Balance(0.1).look(steps, 1000).move
    before = sum(counts)
    counts.clear()
    monkeypatch.setattr(rebalance, "MOST_TASKS", 5 * len(steps[-1].trace.records))
    assert Balance(0.1).look(steps, 1000).move.split == all_of_them.split
    assert sum(counts) <= 2 + 5 + 2 * TRIED + 4 < before


def test_a_verdict_is_on_what_was_promised():
    move = Move(ALIKE, (5, 5, 2, 4), 1.0, 0.8)
    assert Verdict(move, 1 - PROMISED * move.gain).kept and not Verdict(move, 0.95).kept
    assert Verdict(move, 1.1).gain == pytest.approx(-0.1)


@pytest.mark.slow(reason="many simulated runs")
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1.0, 1.3, 2.0]), min_size=4, max_size=4),
    st.lists(st.floats(0.7, 1.4), min_size=12, max_size=12),
    st.sampled_from(["J0", "J3"]),
)
def test_it_settles_at_a_split_that_is_no_slower(slowness, factors, level):
    """Whatever layers really take: moves end, and the last split is no worse than the first."""
    machine = Machine([0.01 * f for f in factors], always(*slowness), estimates=[1] * 12, level=level)
    machine.microbatches = 4
    found = train(machine, (3, 3, 3, 3), 120)
    assert len(found.moves) <= 8
    assert not [move for step, move in found.moves if step > 90], "it has settled"
    before, after = (
        fmean(machine.step(number, split).trace.makespan for number in range(40))  # one step is mostly jitter
        for split in ((3, 3, 3, 3), last(found))
    )
    assert after <= (1 + GAIN) * before


def last(found):
    return splits(found)[-1] if found.moves else (3, 3, 3, 3)


def blocks(*split):
    """What stages of so many blocks take, beside EVEN's one block a stage."""
    factors = [[float(size)] * MICROBATCHES for size in split]
    return WorkloadCosts(EVEN.scaled(factors, factors), rules().placement)


def with_work(step, *split):
    work = Work([LayerWork("Block", 1.0, 3)] * sum(split), split)
    return replace(step, work=lambda: work)


def savings(step):
    layers = Layers.of([step])
    return {change.change: change.seconds for change in what_ifs(step, tried=(), layers=layers).changes}


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


def test_stages_whose_chunks_take_unequally_long_are_not_all_slow():
    work, placement = Work([LayerWork("Block", 1.0, 3)] * 8, [2] * 4), by_name("zb-v").placement_for(2)
    shares = layer_shares(work, {0: 2.0, 1: 2.0, 2: 2.6, 3: 2.6}, placement)
    assert shares.slowness == pytest.approx([1.0, 1.0])


def test_nothing_is_known_without_work():
    assert Layers.of([ran(blocks(1, 1, 1, 1))]) is None
