"""Which layers are heavy and which stages slow, from one split and from several."""

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core.tasks import Placement
from rrfp_jax.trace.layers import BusySample, LayerWork, Work, fitted_shares

FOUR = Placement(4, 1)
EVEN = (4, 4, 4, 4)


def work(split=EVEN, first="Block", last="Block", estimate=1.0):
    layers = [LayerWork("Block", 1.0, 3)] * sum(split)
    layers[0] = LayerWork(first, estimate, 3)
    layers[-1] = LayerWork(last, estimate, 3)
    return Work(layers, split)


def busy(work, seconds, slowness, split):
    ranges = work.ranges(split)
    return [s * sum(seconds[i] for i in own) for s, own in zip(slowness, ranges, strict=True)]


def said(work, shares, split):
    """What the stages take with a split, in all 1."""
    found = busy(work, shares.seconds, shares.slowness, split)
    return [one / sum(found) for one in found]


def test_alike_layers_that_take_longer_are_on_a_slow_stage():
    shares = fitted_shares(work(), [BusySample(EVEN, [4, 4, 6, 4])], FOUR)
    relative = [one / shares.slowness[0] for one in shares.slowness]
    assert relative == pytest.approx([1, 1, 1.5, 1], rel=0.04)
    assert shares.of_time == pytest.approx([1 / 4] * 16) and shares.of_bytes == pytest.approx([1 / 4] * 16)


def test_another_layer_is_heavier_than_its_shapes_say_rather_than_its_stage_slow():
    own = work(first="Embed", last="Head", estimate=0.5)
    shares = fitted_shares(own, [BusySample(EVEN, [3.5, 4, 4, 6.2])], FOUR)
    assert shares.seconds[-1] / shares.seconds[4] > 2
    assert shares.slowness[3] / shares.slowness[1] < 1.15


@pytest.mark.parametrize("slow", [True, False])
def test_a_layer_that_has_moved_tells_which_it_was(slow):
    """A last stage with a heavy head, or a slow one: both take 6.2 at first."""
    own, later = work(first="Embed", last="Head", estimate=0.5), (4, 5, 4, 3)
    seconds = [0.5, *[1.0] * 14, 0.5 if slow else 3.2]
    slowness = [1, 1, 1, 6.2 / 3.5 if slow else 1]
    seen = [BusySample(split, busy(own, seconds, slowness, split)) for split in (EVEN, later)]
    shares = fitted_shares(own, seen, FOUR)
    third = (5, 5, 4, 2)
    truth = busy(own, seconds, slowness, third)
    assert said(own, shares, third) == pytest.approx([one / sum(truth) for one in truth], rel=0.07)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4),
    st.lists(st.integers(1, 6), min_size=4, max_size=4).filter(lambda split: sum(split) < 17),
    st.floats(0.1, 100),
)
def test_what_was_measured_is_what_it_says(slowness, split, scale):
    """Whatever the cause is taken to be: stages are as busy as they were, in any unit of time."""
    own = work(tuple(split))
    measured = [scale * one for one in busy(own, [1.0] * sum(split), slowness, split)]
    shares = fitted_shares(own, [BusySample(tuple(split), measured)], FOUR)
    found = busy(own, shares.seconds, shares.slowness, split)
    assert found == pytest.approx(measured, rel=0.03)
    assert sum(shares.of_time) == pytest.approx(4)


def test_chunks_of_one_stage_are_slow_together():
    placement, own = Placement(4, 2, "v"), Work([LayerWork("Block", 1.0, 3)] * 8, (1,) * 8)
    measured = [3.0 if placement.place(v)[0] == 1 else 1.0 for v in range(8)]
    shares = fitted_shares(own, [BusySample(own.split, measured)], placement)
    assert shares.slowness[1] / shares.slowness[0] == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("split", [(1, 7, 4, 4), (16,)])
def test_layers_that_have_nothing_to_do_by_their_shapes(split):
    layers = [LayerWork("Pass", 0.0, 0), *[LayerWork("Block", float(len(split) > 1), 3)] * 15]
    placement = Placement(len(split), 1)
    shares = fitted_shares(Work(layers, split), [BusySample(split, [float(n) for n in split])], placement)
    assert all(0 < one < float("inf") for one in shares.seconds)


def test_many_virtual_stages_under_several_splits_take_a_part_of_a_second():
    """It took 15 s with as many equations as virtual stages and splits."""
    placement, seen = Placement(8, 8), []
    for moved in range(6):
        split = tuple(2 + (v == moved) - (v == moved + 20) for v in range(64))
        seen.append(BusySample(split, [size * (1.0 + 0.01 * (v % 7)) for v, size in enumerate(split)]))
    began = process_time()
    fitted_shares(Work([LayerWork("Block", 1.0, 3)] * 128, split), seen, placement)
    assert process_time() - began < 3
