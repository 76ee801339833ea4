"""Rows that have two lengths, patches and tokens: buckets fitted to both, packing, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.balance import Cost, Polynomial
from rrfp_jax.data.buckets import check_fit
from rrfp_jax.data.rows import Rows
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields

Pair: TypeAlias = tuple[int, int]
"""Patches and tokens."""

MOST_CELLS = 256
"""Different pairs of lengths that buckets are fitted to; more are rounded up to fewer first."""

MOST_OPEN = 1024
"""Rows that are looked at to put a document into, when packing."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What rows cost by both lengths, in any unit: the sum of an encoder's and of a decoder's.

    Args:
        patches: the encoder's, such as `Polynomial(linear=0.3, square=0.001)`; 0 of no patches.
        tokens: the decoder's.
    """

    patches: Cost = field(default_factory=Polynomial)
    tokens: Cost = field(default_factory=Polynomial)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """int64[..., 2] -> float64[...]."""
        patches, tokens = lengths[..., 0], lengths[..., 1]
        return np.where(patches > 0, self.patches(patches), 0.0) + self.tokens(tokens)


@dataclass(frozen=True, kw_only=True)
class FitBoth:
    """How to choose buckets, pairs of patches and tokens, from those of the data; see `Fit`.

    The share of padding is of what rows cost with it: in `Costs` where given, else of patches and tokens
    added up.

    Args:
        buckets: at most so many.
        padding: the fewest whose padding is at most this share.
        patches: no bucket has more; documents with more are bad.
        tokens: likewise, places of images included.
        patch_multiple: patches of buckets are multiples of this.
        token_multiple: tokens are.

    Raises:
        UsageError: an impossible setting.
    """

    buckets: int | None = None
    padding: float | None = None
    patches: int
    tokens: int
    patch_multiple: int = 1
    token_multiple: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        multiples = {"patches": self.patch_multiple, "tokens": self.token_multiple}
        check_fit(self, self.buckets, self.padding, **multiples)

    def pairs(self, rows: NDArray[np.int64], costs: Costs) -> tuple[Pair, ...]:
        """Buckets for rows int64[N, 2] none of which is longer than may be; by ascending cost.

        Raises:
            UsageError: the share of padding cannot be had, because of `buckets` or a multiple.
        """
        multiple = np.array([self.patch_multiple, self.token_multiple])
        rounded = np.maximum(-(-rows // multiple), 1) * multiple
        own, fits = float(costs(rows).sum()), []
        for found, cost in best_pairs(rounded, costs):
            fits.append((found, 1 - own / cost))
        small = [fit for fit in fits if self.buckets is None or len(fit[0]) <= self.buckets]
        if self.padding is None:
            return small[0][0]
        enough = [fit for fit in small if fit[1] <= self.padding]
        if not enough:
            remedy = "more buckets" if len(small) < len(fits) else "smaller multiples"
            raise UsageError(f"{self}: {len(small[0][0])} buckets still pad {small[0][1]:.3f}; give {remedy}")
        return enough[-1][0]


def best_pairs(rows: NDArray[np.int64], costs: Costs) -> Iterator[tuple[tuple[Pair, ...], float]]:
    """Few buckets for rows int64[N, 2], fewer and fewer to one: (pairs by ascending cost, cost of all rows).

    Of each bucket, both lengths are those of some of its rows. To choose the best is hard (unlike in one
    dimension, where `best_buckets` does), so this is a heuristic: buckets begin as the different pairs
    themselves; again and again the two are joined whose joining costs least; and after each, rows move to the
    cheapest bucket that holds them and buckets shrink to their rows, for as long as that makes them cheaper.
    O(D**3) for D <= `MOST_CELLS` pairs, about a second.
    """
    cells, count = np.unique(_fewer(rows), axis=0, return_counts=True)
    corners, group = cells.copy(), np.arange(len(cells))
    while True:
        corners, group = _settled(cells, count, corners, costs)
        order = np.argsort(costs(corners), kind="stable")
        total = float((costs(corners[group]) * count).sum())
        yield tuple((int(p), int(t)) for p, t in corners[order]), total
        if len(corners) == 1:
            return
        weight = np.bincount(group, count, len(corners))
        joined = np.maximum(corners[:, None], corners[None, :])
        own = costs(corners) * weight
        more = costs(joined) * (weight[:, None] + weight[None, :]) - own[:, None] - own[None, :]
        more[np.tril_indices(len(corners))] = np.inf
        one, other = np.unravel_index(int(more.argmin()), more.shape)
        corners[one] = joined[one, other]
        corners = np.delete(corners, other, axis=0)


def _settled(
    cells: NDArray[np.int64], count: NDArray[np.int64], corners: NDArray[np.int64], costs: Costs
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Buckets shrunk to the cells that are cheapest in them, and which each cell is in."""
    least = np.inf
    while True:
        group = cheapest(cells, corners, costs)
        used, group = np.unique(group, return_inverse=True)
        corners = np.zeros((len(used), 2), np.int64)
        np.maximum.at(corners, group, cells)
        total = float((costs(corners[group]) * count).sum())
        if total >= least:
            return corners, group
        least = total


def cheapest(
    rows: NDArray[np.int64], pairs: Sequence[Pair] | NDArray[np.int64], costs: Costs
) -> NDArray[np.int64]:
    """int64[N]: the cheapest of the buckets that holds each row int64[N, 2]; -1 if none does."""
    corners = np.asarray(pairs, np.int64)
    best, least = np.full(len(rows), -1), np.full(len(rows), np.inf)
    for bucket, cost in enumerate(costs(corners).tolist()):
        better = (rows <= corners[bucket]).all(axis=1) & (cost < least)
        best[better], least[better] = bucket, cost
    return best


def _fewer(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows rounded up, by no more than it takes, to at most `MOST_CELLS` different ones.

    Each is rounded to the longest of its neighbours in length, so that nothing gets longer than the longest.
    """
    parts = 2 * MOST_CELLS
    found = rows
    while len(np.unique(found, axis=0)) > MOST_CELLS:
        parts = parts * 3 // 4
        found = np.stack([_up(column, parts) for column in rows.T], axis=1)
    return found


def _up(lengths: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Rounded up to one of so many of their own quantiles."""
    marks: NDArray[np.int64] = np.unique(
        np.quantile(lengths, np.linspace(0, 1, parts + 1)[1:], method="higher")
    )
    return marks[np.searchsorted(marks, lengths)]


def check_pairs(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Configured buckets.

    Raises:
        UsageError: none, one that is no pair of lengths of at least 1, or one twice.
    """
    good = all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair)
        for pair in pairs
    )
    found = tuple((pair[0], pair[1]) for pair in pairs) if good else ()
    if not found or len(set(found)) < len(found):
        raise UsageError(f"lengths={tuple(pairs)}: give different pairs (patches, tokens) of at least 1 each")
    return found


def packed_pairs(rows: NDArray[np.int64], most: Pair) -> Rows:
    """Documents int64[N, 2], none longer than `most` in either, in rows of that: best-fit decreasing.

    Documents are taken by their larger share of a row, from the largest on, equal ones by index. Each goes
    where the least room stays, added up as shares of both lengths, among the `MOST_OPEN` rows that were begun
    last and hold it.
    """
    share = rows / np.array(most)
    packed: list[list[int]] = []
    numbers = np.zeros(0, np.int64)
    room = np.zeros((0, 2), np.int64)
    for document in np.argsort(-share.max(axis=1), kind="stable").tolist():
        size = rows[document]
        left = np.where((room >= size).all(axis=1), ((room - size) / most).sum(axis=1), np.inf)
        at = int(left.argmin()) if len(left) else 0
        if not len(left) or left[at] == np.inf:
            at, keep = min(len(numbers), MOST_OPEN - 1), slice(-MOST_OPEN + 1, None)
            numbers = np.append(numbers[keep], len(packed))
            room = np.append(room[keep], [most], axis=0)
            packed.append([])
        packed[numbers[at]].append(document)
        room[at] -= size
    start = np.concatenate([[0], np.cumsum([len(row) for row in packed], dtype=np.int64)])
    order = np.array([document for row in packed for document in row], np.int64)
    return Rows(start, order, np.add.reduceat(rows[order], start[:-1], axis=0))
