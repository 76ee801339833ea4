"""Buckets of two lengths, packing and costs: pure functions against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.data.balance import Polynomial
from rrfp_jax.data.two_lengths import (
    MOST_CELLS,
    Costs,
    FitBoth,
    best_pairs,
    cheapest,
    check_pairs,
    packed_pairs,
)
from rrfp_jax.errors import UsageError

PROPERTY = settings(max_examples=60, derandomize=True, deadline=None)
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
    """Over 40 draws of 9 rows; the best is found by trying all choices of corners."""
    random, costs, over = np.random.default_rng(0), Costs(), []
    for _ in range(40):
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
    pairs = FitBoth(buckets=8, patches=1000, tokens=1000).pairs(rows, Costs())
    assert len(pairs) <= 8 and (cheapest(rows, pairs, Costs()) >= 0).all()
    assert pairs[-1] == tuple(rows.max(axis=0))
    one = cost_of(rows, [pairs[-1]], Costs())
    assert cost_of(rows, pairs, Costs()) < 0.75 * one


@PROPERTY
@given(ROWS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 60))
def test_fits_keep_multiples_numbers_and_shares(rows, patch_multiple, token_multiple, percent):
    rest = {
        "patches": 12 * patch_multiple,
        "tokens": 12 * token_multiple,
        "patch_multiple": patch_multiple,
        "token_multiple": token_multiple,
    }
    pairs = FitBoth(buckets=3, **rest).pairs(rows, Costs())
    assert 1 <= len(pairs) <= 3 and (cheapest(rows, pairs, Costs()) >= 0).all()
    assert all(p % patch_multiple == 0 < p and t % token_multiple == 0 < t for p, t in pairs)
    try:
        shared = FitBoth(padding=percent / 100, **rest).pairs(rows, Costs())
    except UsageError as error:
        assert "give smaller multiples" in str(error)
        return
    share = 1 - float(Costs()(rows).sum()) / cost_of(rows, shared, Costs())
    assert share <= percent / 100 + 1e-9


@PROPERTY
@given(ROWS, st.integers(12, 30), st.integers(12, 30))
def test_packing_takes_every_document_once(rows, patches, tokens):
    packed = packed_pairs(rows, (patches, tokens))
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
        check_pairs(pairs)
