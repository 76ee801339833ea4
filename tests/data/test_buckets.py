"""Buckets of one length and of two, rows, packing and costs: pure functions against brute force."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.data.buckets import (
    MOST_CELLS,
    Costs,
    Fit,
    Polynomial,
    Table,
    best_buckets,
    best_pairs,
    cheapest,
    check_lengths,
    cut,
    one_each,
    pack,
    rows_by_cost,
    rows_by_limits,
)
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
        (lambda: check_lengths((8, 8), 1), r"lengths=\(8, 8\): give different"),
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
    pieces = cut(predictions, longest)
    covered = Counter()
    for document, begin, size in zip(pieces.document, pieces.begin, pieces.size, strict=True):
        assert 1 <= size <= longest
        covered.update((int(document), int(at)) for at in range(begin, begin + size))
    assert covered == Counter((d, at) for d, count in enumerate(predictions) for at in range(count))
    assert len(pieces.size) == sum(-(-int(count) // longest) for count in predictions)


@PROPERTY
@given(LENGTHS)
def test_packing_is_best_fit_decreasing(sizes):
    rows = pack(sizes, (14,))
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


def test_costs_and_rows():
    assert Polynomial(fixed=1, linear=2, square=3)(np.array([0, 2])).tolist() == [1, 17]
    table = Table(((10, 1.0), (20, 3.0), (40, 4.0)))
    assert table(np.array([5, 10, 15, 20, 30, 60])).tolist() == [0.5, 1, 2, 3, 3.5, 5]
    assert rows_by_cost((1, 5, 10), 2, table) == (20, 4, 2)
    assert Table(((10, 2.0), (20, 3.0)))(np.array([0, 5])).tolist() == [1, 1.5], (
        "as prolonged, if that is more"
    )
    for one in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(UsageError, match=f"a row of 10 costs {one}; give costs above 0"):
            rows_by_cost((10, 30), 2, lambda tokens, one=one: np.array([one, 3.0]))
    assert rows_by_limits((10, 30, 100), (90,), 0) == (9, 3, 1)
    assert rows_by_cost((10, 30, 100), 2, Polynomial()) == (20, 7, 2)
    assert rows_by_cost((10, 30, 100), 2, Polynomial(linear=0, square=1)) == (200, 22, 2)


# Two lengths.

ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=20).map(
    lambda rows: np.array(rows, np.int64)
)
COSTS = st.builds(
    lambda patch, square: Costs(patches=Polynomial(linear=patch, square=square)),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.1]),
)


def cost_of(rows, pairs, costs):
    return float(costs(np.array(pairs)[cheapest(rows, pairs, costs)]).sum())


@PROPERTY
@given(ROWS, COSTS)
def test_fitted_pairs_hold_all_rows_and_shrink_to_one(rows, costs):
    found = list(best_pairs(rows, costs))
    assert [len(pairs) for pairs, _ in found] == sorted({len(pairs) for pairs, _ in found}, reverse=True)
    for pairs, cost in found:
        assert (cheapest(rows, pairs, costs) >= 0).all()
        assert cost == pytest.approx(cost_of(rows, pairs, costs))
        each = costs(np.array(pairs))
        assert (np.diff(each) >= 0).all() and len(set(pairs)) == len(pairs)
        for patches, tokens in pairs:  # no longer than some row
            assert patches in rows[:, 0] and tokens in rows[:, 1]
    assert found[0][1] == pytest.approx(float(costs(rows).sum())), "with enough of them nothing pads"
    assert found[-1][0] == (tuple(rows.max(axis=0)),)
    assert [cost for _, cost in found] == sorted(cost for _, cost in found)


def test_fitted_pairs_cost_little_more_than_the_best():
    """Over 20 draws of 9 rows; the best is found by trying all choices of corners."""
    random, costs, over = np.random.default_rng(0), Costs(), []
    for _ in range(20):
        rows = random.integers(1, 12, (9, 2))
        corners = list(itertools.product(*(sorted(set(column)) for column in rows.T.tolist())))
        least = min(
            cost_of(rows, pairs, costs)
            for pairs in itertools.combinations(corners, 2)
            if (cheapest(rows, pairs, costs) >= 0).all()
        )
        (cost,) = [cost for pairs, cost in best_pairs(rows, costs) if len(pairs) == 2]
        over.append(cost / least - 1)
    assert min(over) > -1e-9 and np.mean(over) < 0.03 and max(over) < 0.15


def test_many_different_rows_are_rounded_up_first():
    rows = np.random.default_rng(0).integers(1, 1000, (2000, 2))
    assert len(np.unique(rows, axis=0)) > 4 * MOST_CELLS
    pairs = Fit(buckets=8, longest=(1000, 1000)).lengths(rows, Costs())
    assert len(pairs) <= 8 and (cheapest(rows, pairs, Costs()) >= 0).all()
    assert pairs[-1] == tuple(rows.max(axis=0))
    one = cost_of(rows, [pairs[-1]], Costs())
    assert cost_of(rows, pairs, Costs()) < 0.75 * one


@PROPERTY
@given(ROWS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 60))
def test_fits_keep_multiples_numbers_and_shares(rows, patch_multiple, token_multiple, percent):
    rest = {
        "longest": (12 * patch_multiple, 12 * token_multiple),
        "multiple": (patch_multiple, token_multiple),
    }
    pairs = Fit(buckets=3, **rest).lengths(rows, Costs())
    assert 1 <= len(pairs) <= 3 and (cheapest(rows, pairs, Costs()) >= 0).all()
    assert all(p % patch_multiple == 0 < p and t % token_multiple == 0 < t for p, t in pairs)
    try:
        shared = Fit(padding=percent / 100, **rest).lengths(rows, Costs())
    except UsageError as error:
        assert "give smaller multiples" in str(error)
        return
    share = 1 - float(Costs()(rows).sum()) / cost_of(rows, shared, Costs())
    assert share <= percent / 100 + 1e-9


@PROPERTY
@given(ROWS, st.integers(12, 30), st.integers(12, 30))
def test_packing_takes_every_document_once(rows, patches, tokens):
    packed = pack(rows, (patches, tokens))
    assert sorted(packed.order.tolist()) == list(range(len(rows)))
    for row, size in enumerate(packed.size):
        own = rows[packed.pieces(row)]
        assert len(own) and (own.sum(axis=0) == size).all() and (size <= (patches, tokens)).all()
    fewest = np.ceil(rows.sum(axis=0) / (patches, tokens)).max()
    assert fewest <= len(packed.size) <= len(rows)
    two = [a + b for a, b in itertools.combinations(packed.size, 2)]
    assert all((size > (patches, tokens)).any() for size in two), "two rows that fit into one"


def test_costs_add_an_encoders_and_a_decoders():
    costs = Costs(patches=Polynomial(fixed=5, linear=2), tokens=Polynomial(square=1))
    assert costs(np.array([[0, 2], [3, 2]])).tolist() == [6.0, 17.0]


@pytest.mark.parametrize("pairs", [(), ((4, 4), (4, 4)), ((0, 4),), ((4,),), (4, 4), ((4, "4"),)])
def test_impossible_pairs_are_refused(pairs):
    with pytest.raises(UsageError, match="give different pairs"):
        check_lengths(pairs, 2)
