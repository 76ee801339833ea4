"""Bucket lengths, rows, costs and draws: pure functions against brute force."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.data.balance import Polynomial, Table, even_out, ordered, rows_by_cost, rows_by_tokens
from rrfp_jax.data.buckets import Fit, best_buckets, bucket_of, check_lengths
from rrfp_jax.data.draw import EMPTY, Draw
from rrfp_jax.data.rows import one_each, packed, split
from rrfp_jax.errors import UsageError

LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=25).map(lambda x: np.array(x, np.int64))
PROPERTY = settings(max_examples=60, derandomize=True, deadline=None)


def padding(rows, lengths):
    return int(sum(min(length for length in lengths if length >= row) - row for row in rows))


@settings(PROPERTY, max_examples=30)
@given(LENGTHS, st.integers(1, 3))
def test_no_choice_of_as_many_buckets_pads_less(rows, multiple):
    candidates = sorted(set((-(-rows // multiple) * multiple).tolist()))
    found = list(best_buckets(rows, multiple))
    assert len(found) == len(candidates)
    for count, (lengths, pads) in enumerate(found, 1):
        choices = [c for c in itertools.combinations(candidates, count) if c[-1] == candidates[-1]]
        assert pads == padding(rows, lengths) == min(padding(rows, choice) for choice in choices)


@PROPERTY
@given(LENGTHS, st.integers(0, 40))
def test_a_share_of_padding_takes_the_fewest_buckets(rows, percent):
    share = percent / 100
    lengths = Fit(padding=share, longest=14).lengths(rows)
    shares = [pads / (pads + rows.sum()) for _, pads in best_buckets(rows)]
    assert shares[len(lengths) - 1] <= share < min(shares[: len(lengths) - 1], default=1)


def test_fewer_buckets_than_allowed_if_none_pads():
    assert Fit(buckets=5, longest=8).lengths(np.array([3, 3, 8])) == (3, 8)


@PROPERTY
@given(LENGTHS, st.integers(0, 40), st.integers(1, 5))
def test_a_share_of_padding_with_at_most_so_many_buckets(rows, percent, most):
    fewest = Fit(padding=percent / 100, longest=14).lengths(rows)
    both = Fit(padding=percent / 100, buckets=most, longest=14)
    if len(fewest) <= most:
        assert both.lengths(rows) == fewest
    else:
        with pytest.raises(UsageError, match=f"{most} buckets still pad 0.*; give more buckets"):
            both.lengths(rows)


def test_a_share_that_the_multiple_forbids_is_refused():
    with pytest.raises(UsageError, match=r"1 buckets still pad 0\.625; give multiple < 8"):
        Fit(padding=0.1, longest=8, multiple=8).lengths(np.array([3]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Fit(longest=8), "give a number of buckets, a share of padding, or both"),
        (lambda: Fit(buckets=0, longest=8), "at least one bucket"),
        (lambda: Fit(padding=1.0, longest=8), "a share, from 0 to below 1"),
        (lambda: Fit(buckets=1, longest=9, multiple=8), "longest must be a positive multiple"),
        (lambda: check_lengths((8, 8)), r"lengths=\(8, 8\): give different"),
        (lambda: bucket_of(9, (4, 8)), r"9 tokens fits no bucket of \(4, 8\); the nearest is 8"),
        (lambda: Polynomial(linear=0.0), "must grow with tokens"),
        (lambda: Table(((1, 2.0),)), "at least two points"),
        (lambda: Table(((1, 2.0), (2, 1.0))), "costs that never fall"),
    ],
)
def test_impossible_settings_are_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        wrong()


@PROPERTY
@given(st.lists(st.integers(0, 30), min_size=1).map(lambda x: np.array(x, np.int64)), st.integers(1, 9))
def test_pieces_cover_every_prediction_once(predictions, longest):
    pieces = split(predictions, longest)
    covered = Counter()
    for document, begin, size in zip(pieces.document, pieces.begin, pieces.size, strict=True):
        assert 1 <= size <= longest
        covered.update((int(document), int(at)) for at in range(begin, begin + size))
    assert covered == Counter((d, at) for d, count in enumerate(predictions) for at in range(count))
    assert len(pieces.size) == sum(-(-int(count) // longest) for count in predictions)


@PROPERTY
@given(LENGTHS)
def test_packing_is_best_fit_decreasing(sizes):
    rows = packed(sizes, 14)
    assert sorted(rows.order) == list(range(len(sizes)))
    assert [int(sizes[rows.pieces(r)].sum()) for r in range(len(rows.size))] == rows.size.tolist()
    assert rows.size.max() <= 14
    rooms = []  # by the definition: into the fullest row that has room, else a new one
    for size in sorted(sizes.tolist(), reverse=True):
        fits = [room for room in rooms if room >= size]
        rooms.append(min(fits, default=14) - size)
        if fits:
            rooms.remove(min(fits))
    assert sorted(14 - rows.size) == sorted(rooms)
    alone = one_each(sizes)
    assert [alone.pieces(r).tolist() for r in range(len(sizes))] == [[r] for r in range(len(sizes))]


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
    drawn = [mb for step in steps for mb in draw.training(step)][: sum(microbatches)]
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
    asked_late.training(9)
    found = [(bucket, rows.tolist()) for step in (0, 1) for bucket, rows in draw.training(step)]
    assert found == [(b, r.tolist()) for step in (0, 1) for b, r in asked_late.training(step)]
    assert found == [(0, [2, 3]), (1, [1]), (1, [2]), (1, [0]), (0, [4, 1]), (0, [0, 2])]
    other = Draw((5, 3), (2, 1), 3, seed=2)
    assert found != [(b, r.tolist()) for step in (0, 1) for b, r in other.training(step)]


@PROPERTY
@given(DRAWS)
def test_a_pass_has_every_row_once_in_order(draw):
    seen = [[], [], []]
    for step in range(draw.steps_of_a_pass):
        microbatches = draw.passing(step)
        assert len(microbatches) == draw.microbatches
        for bucket, rows in microbatches:
            assert len(rows) == draw.taken[bucket]
            seen[bucket] += [row for row in rows.tolist() if row != EMPTY]
    assert seen == [list(range(count)) for count in draw.rows]
    again = draw.passing(draw.steps_of_a_pass)
    assert [(b, r.tolist()) for b, r in again] == [(b, r.tolist()) for b, r in draw.passing(0)]


def test_costs_and_rows():
    assert Polynomial(fixed=1, linear=2, square=3)(np.array([0, 2])).tolist() == [1, 17]
    table = Table(((10, 1.0), (20, 3.0), (40, 4.0)))
    assert table(np.array([5, 10, 15, 20, 30, 60])).tolist() == [0, 1, 2, 3, 3.5, 5]
    assert rows_by_tokens((10, 30, 100), 90) == (9, 3, 1)
    assert rows_by_cost((10, 30, 100), 2, Polynomial()) == (20, 7, 2)
    assert rows_by_cost((10, 30, 100), 2, Polynomial(linear=0, square=1)) == (200, 22, 2)


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
