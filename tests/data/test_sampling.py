"""Draws, balance and orders: pure functions against brute force."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.data.sampling import EMPTY, Draw, even_out, ordered

PROPERTY = settings(max_examples=60, derandomize=True, deadline=None)

DRAWS = st.builds(
    Draw,
    st.lists(st.integers(0, 12), min_size=3, max_size=3).filter(any).map(tuple),
    st.lists(st.integers(1, 5), min_size=3, max_size=3).map(tuple),
    st.integers(1, 4),
    st.integers(0, 3),
)


@settings(PROPERTY, max_examples=25)
@given(DRAWS)
def test_an_epoch_has_every_row_once_and_the_next_begins_without_a_gap(draw):
    epochs = 5
    microbatches = [epochs * rows // taken for rows, taken in zip(draw.rows, draw.taken, strict=True)]
    steps = range(-(-sum(microbatches) // draw.microbatches))
    drawn = [mb for step in steps for mb in draw.training_step(step)][: sum(microbatches)]
    for bucket, count in enumerate(draw.rows):
        own = [rows.tolist() for of, rows in drawn if of == bucket]
        assert len(own) == microbatches[bucket]
        assert all(len(rows) == draw.taken[bucket] for rows in own)
        times = Counter(row for rows in own for row in rows)
        assert set(times) <= set(range(count))
        assert not own or max(times.values()) - min(times[row] for row in range(count)) <= 1


def test_a_draw_is_a_function_of_the_step_and_pinned():
    # Every process and every later version must draw the same, or a restored run would see other data.
    draw = Draw((5, 3), (2, 1), 3, seed=1)
    asked_late = Draw((5, 3), (2, 1), 3, seed=1)
    asked_late.training_step(9)
    found = [(bucket, rows.tolist()) for step in (0, 1) for bucket, rows in draw.training_step(step)]
    assert found == [(b, r.tolist()) for step in (0, 1) for b, r in asked_late.training_step(step)]
    assert found == [(0, [2, 3]), (1, [1]), (1, [2]), (1, [0]), (0, [4, 1]), (0, [0, 2])]
    other = Draw((5, 3), (2, 1), 3, seed=2)
    assert found != [(b, r.tolist()) for step in (0, 1) for b, r in other.training_step(step)]


@PROPERTY
@given(DRAWS)
def test_a_pass_has_every_row_once_in_order(draw):
    seen = [[], [], []]
    for step in range(draw.validation_steps):
        microbatches = draw.validation_step(step)
        assert len(microbatches) == draw.microbatches
        for bucket, rows in microbatches:
            assert len(rows) == draw.taken[bucket]
            seen[bucket] += [row for row in rows.tolist() if row != EMPTY]
    assert seen == [list(range(count)) for count in draw.rows]
    again = draw.validation_step(draw.validation_steps)
    assert [(b, r.tolist()) for b, r in again] == [(b, r.tolist()) for b, r in draw.validation_step(0)]


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_dealing_evens_costs_out(bins, room, seed):
    costs = np.random.default_rng(seed).exponential(size=bins * room)
    dealt = even_out(costs, bins)
    assert dealt.shape == (bins, room) and sorted(dealt.ravel()) == list(range(bins * room))
    sums = costs[dealt].sum(axis=1)
    assert np.ptp(sums) <= max(np.ptp(costs.reshape(bins, room).sum(axis=1)), costs.max()) + 1e-9


def test_orders_of_a_step():
    costs = [2.0, 9.0, 2.0, 5.0, 1.0]
    assert ordered(costs, "drawn") == [0, 1, 2, 3, 4]
    assert ordered(costs, "longest") == [1, 3, 0, 2, 4]
    assert ordered(costs, "shortest") == [4, 0, 2, 3, 1]
    assert ordered(costs, "zigzag") == [1, 4, 3, 2, 0]
