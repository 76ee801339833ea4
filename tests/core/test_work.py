"""What layers have to do, and what that says of the stages' times."""

import pytest

from rrfp_jax.core.tasks import Placement
from rrfp_jax.trace.layers import LayerWork, Work, layer_shares, least_largest

FOUR = Placement(4, 1)


def work(*split, first="Block", last="Block", estimate=1.0):
    layers = [LayerWork("Block", 1.0, 10) for _ in range(sum(split))]
    layers[0] = LayerWork(first, estimate, 10)
    layers[-1] = LayerWork(last, estimate, 10)
    return Work(layers, split)


def found(work, *busy):
    return layer_shares(work, dict(enumerate(busy)), FOUR)


def test_more_to_do_is_not_slow():
    shares = found(work(7, 3, 3, 3), 7.0, 3.0, 3.0, 3.0)
    assert shares.slowness == pytest.approx([1, 1, 1, 1])
    assert shares.seconds == pytest.approx([1.0] * 16)


def test_the_same_work_takes_longer():
    shares = found(work(4, 4, 4, 4), 4.0, 4.0, 6.4, 4.0)
    assert shares.slowness == pytest.approx([1, 1, 1.6, 1])
    assert shares.seconds == pytest.approx([1.0] * 16), "on a stage that is not slow"


def test_both_at_once():
    shares = found(work(7, 3, 3, 3), 7.0, 4.5, 3.0, 3.0)
    assert shares.slowness == pytest.approx([1, 1.5, 1, 1])


def test_other_layers_take_the_rest():
    own = work(4, 4, 4, 4, first="Embed", last="Head", estimate=0.5)
    shares = found(own, 3.2, 4.0, 4.0, 4.4)
    assert shares.slowness == pytest.approx([1, 1, 1, 1])
    assert shares.seconds[0] == pytest.approx(0.2) and shares.seconds[-1] == pytest.approx(1.4)
    assert shares.of_time[:4] == pytest.approx([0.2 / 3.2, *[1 / 3.2] * 3])


def test_up_to_three_times_what_shapes_say():
    shares = found(work(4, 4, 4, 4, first="Embed", last="Head"), 4.0, 4.0, 4.0, 9.0)
    assert shares.slowness == pytest.approx([1, 1, 1, 1.5]), "three blocks, and a head of three more"


def test_nothing_is_known_of_two_unlike_stages():
    own = Work([LayerWork("Embed", 1.0, 0), LayerWork("Head", 1.0, 0)], (1, 1))
    shares = layer_shares(own, {0: 1.0, 1: 5.0}, Placement(2, 1))
    assert shares.slowness == [1.0, 1.0] and shares.of_bytes == [1.0, 1.0]


def test_a_stage_with_two_chunks():
    own = Work([LayerWork("Block", 1.0, 1)] * 8, (1,) * 8)
    placement = Placement(4, 2, "v")
    slow = {v: 3.0 if placement.place(v)[0] == 1 else 1.0 for v in range(8)}
    assert layer_shares(own, slow, placement).slowness == pytest.approx([1, 3, 1, 1])


def test_cuts_whose_largest_cost_is_least():
    seconds = [4, 1, 1, 1, 1]
    assert least_largest(lambda v, a, b: sum(seconds[a:b]), 5, 2) == (4, [1, 4])
    doubled = least_largest(lambda v, a, b: sum(seconds[a:b]) * (2 if v == 1 else 1), 5, 2)
    assert doubled == (6, [2, 3])
