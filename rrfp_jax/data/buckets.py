"""Buckets: the few shapes that rows are padded to; what rows cost, and how documents become rows.

A row has one length, its tokens, or two, patches and tokens. Arrays of lengths are int64[N] or int64[N, 2].
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, says_its_arguments, shown

Pair: TypeAlias = tuple[int, int]
"""Patches and tokens."""

MOST_CELLS = 256
"""Different pairs of lengths that buckets are fitted to; more are rounded up to fewer first."""

MOST_OPEN = 1024
"""Rows of two lengths that are looked at to put a document into, when packing."""


# Costs.


class Cost(Protocol):
    """Costs of documents (or of padded rows) by their tokens, in any unit; float64[...]. See `Costs`, too."""

    def __call__(self, tokens: NDArray[Any], /) -> NDArray[np.float64]:
        """One each."""


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """`fixed + linear n + square n**2` for n tokens; in tokens, unless told otherwise.

    A transformer block of width d that attends to all n tokens takes about 24 n d**2 + 4 n**2 d FLOPs
    forward: `square / linear` is about 1 / (6 d).
    """

    fixed: float = 0.0
    linear: float = 1.0
    square: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        costs = (self.fixed, self.linear, self.square)
        if not all(0 <= cost < math.inf for cost in costs) or self.linear + self.square <= 0:
            raise UsageError(f"{self}: costs must be finite and not negative, and must grow with tokens")

    def __call__(self, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """Evaluate it."""
        n = np.asarray(tokens, np.float64)
        return self.fixed + n * (self.linear + n * self.square)


@dataclass(frozen=True)
class Table:
    """Measured costs, `((tokens, cost), ...)`, with straight lines between and, prolonged, beyond them.

    Fewer tokens than the first point's cost at least their share of it.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        try:
            points = np.array(self.points, np.float64)
        except (ValueError, TypeError, OverflowError):
            raise UsageError(f"points={shown(self.points)}: give pairs of numbers, (tokens, cost)") from None
        good = points.ndim == 2 and len(points) >= 2 and np.isfinite(points).all()
        if not good or (np.diff(points, axis=0) < [1, 0]).any() or points[0, 1] <= 0:
            raise UsageError(
                f"{self}: give at least two points: more and more tokens, positive costs that never fall"
            )

    def __call__(self, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """Interpolate."""
        x, y = np.array(self.points, np.float64).T
        n = np.asarray(tokens, np.float64)
        at = np.clip(np.searchsorted(x, n), 1, len(x) - 1)
        slope = (y[at] - y[at - 1]) / (x[at] - x[at - 1])
        share = np.minimum(n / max(x[0], 1), 1) * y[0]
        cost: NDArray[np.float64] = np.maximum(y[at - 1] + (n - x[at - 1]) * slope, share)
        return cost


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


def rows_by_limits(lengths: Sequence[int | Pair], limits: Sequence[int | None], rows: int) -> tuple[int, ...]:
    """How many rows of each bucket keep the limits of each length (None: `rows`); at least one."""
    return tuple(
        max(1, min(most // length if most else rows for most, length in zip(limits, own, strict=True)))
        for own in np.reshape(lengths, (len(lengths), -1)).tolist()
    )


def rows_by_cost(lengths: Sequence[int | Pair], longest: int, cost: Cost) -> tuple[int, ...]:
    """As many rows of each bucket as cost about the same as so many of the last one; at least one."""
    each = cost(np.array(lengths))
    for length, one in zip(lengths, each, strict=True):
        if not 0 < one < math.inf:
            raise UsageError(f"balance={shown(cost)}: a row of {length} costs {one}; give costs above 0")
    return tuple(max(1, round(longest * float(each[-1] / one))) for one in each)


def cheapest(rows: NDArray[np.int64], lengths: ArrayLike, cost: Cost) -> NDArray[np.int64]:
    """int64[N]: the cheapest of the buckets that holds each row; -1 if none does."""
    corners = np.asarray(lengths, np.int64)
    best, least = np.full(len(rows), -1), np.full(len(rows), np.inf)
    for bucket, own in enumerate(cost(corners).tolist()):
        holds = rows <= corners[bucket]
        better = (holds.all(axis=1) if rows.ndim == 2 else holds) & (own < least)
        best[better], least[better] = bucket, own
    return best


# Lengths of buckets, given or fitted.


def check_lengths(given: Sequence[Any], count: int) -> tuple[Any, ...]:
    """Configured buckets of `count` lengths each, ascending; raises UsageError for odd ones, or one twice."""
    found = [tuple(own) if isinstance(own, (tuple, list)) else (own,) for own in given]
    fit = all(len(own) == count and all(isinstance(n, Integral) and int(n) > 0 for n in own) for own in found)
    if not found or not fit or len(set(found)) < len(found):
        kind = "bucket lengths of at least 1" if count == 1 else "pairs (patches, tokens) of at least 1 each"
        raise UsageError(f"lengths={tuple(given)}: give different {kind}")
    return tuple(sorted(own if count > 1 else own[0] for own in found))


@says_its_arguments()
@dataclass(frozen=True, kw_only=True)
class Fit:
    """How to choose buckets from the lengths of the data; give one of the first two, or both.

    With images, buckets have two lengths, patches and tokens, and padding is a share of what rows cost with
    it: in `Costs` where given, else of patches and tokens added up. Otherwise it is a share of all positions.

    Args:
        buckets: at most so many; without `padding`, with the least padding that is found for so many.
        padding: the fewest whose padding is at most this share.
        longest: no bucket is longer, `longest=512`, or with images `longest=(patches, tokens)`. Longer texts
            are split; longer documents with images are bad.
        multiple: lengths are multiples of this, or of these two.

    Raises:
        UsageError: an impossible setting.
    """

    buckets: int | None = None
    padding: float | None = None
    longest: int | tuple[int, ...]
    multiple: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.buckets is None and self.padding is None:
            raise UsageError(f"{self}: give a number of buckets, a share of padding, or both")
        if self.buckets is not None and self.buckets < 1:
            raise UsageError(f"{self}: give at least one bucket")
        if self.padding is not None and not 0 <= self.padding < 1:
            raise UsageError(f"{self}: padding is a share, from 0 to below 1")
        longest, multiple = np.array(self.longest), np.array(self.multiple)
        if longest.shape not in ((), (2,)) or multiple.shape not in ((), longest.shape):
            raise UsageError(f"{self}: give one length, or with images two, (patches, tokens)")
        if (np.minimum(multiple, longest) < 1).any() or (longest % multiple).any():
            raise UsageError(f"{self}: longest must be a positive multiple of {self.multiple}")

    def lengths(self, rows: NDArray[np.int64], cost: Cost = Polynomial()) -> tuple[Any, ...]:
        """Buckets, ascending, for rows none of which is too long; `UsageError` if they pad too much.

        Rows are int64[N], whose padding is counted in tokens whatever they cost, or int64[N, 2].
        """
        own, multiple = float(cost(rows).sum()), np.array(self.multiple)
        fits: Iterable[tuple[tuple[Any, ...], float]]
        if rows.ndim == 1:
            tokens = int(rows.sum())
            exact = best_buckets(rows, int(multiple))
            fits = ((found, padding / (padding + tokens)) for found, padding in exact)
        else:
            pairs = [*best_pairs(np.maximum(-(-rows // multiple), 1) * multiple, cost)]
            fits = ((found, 1 - own / total) for found, total in reversed(pairs))
        remedy = "smaller multiples" if rows.ndim > 1 else f"multiple < {self.multiple}"
        for found, share in fits:
            if self.buckets is not None and len(found) > self.buckets:
                remedy = "more buckets"
                break
            best, least = found, share
            if self.padding is not None and share <= self.padding:
                return best
        if self.padding is not None:
            raise UsageError(f"{self}: {len(best)} buckets still pad {least:.3f}; give {remedy}")
        return best


def best_buckets(rows: NDArray[np.int64], multiple: int = 1) -> Iterator[tuple[tuple[int, ...], int]]:
    """The best one bucket, the best two, and so on: (ascending lengths, tokens of padding).

    Exact: of all choices of k lengths, one with the least padding. With D different row lengths, in units of
    `multiple`, each further bucket takes O(D) time and memory. Let C and S be the number and the summed
    tokens of rows up to a length. The least padding of rows up to L[j] with one bucket more is

        min over i < j of least[i] + L[j] (C[j] - C[i]) - (S[j] - S[i]),

    for every j the lowest of the lines least[i] + S[i] - C[i] x at x = L[j]. Slopes fall with i and x rises
    with j, so a lower envelope of lines that is built and read from left to right gives all of them.
    """
    lengths, where = np.unique(-(-rows // multiple) * multiple, return_inverse=True)
    L = [0, *lengths.tolist()]
    C = [0, *np.cumsum(np.bincount(where)).tolist()]
    S = [0, *np.cumsum(np.bincount(where, rows)).astype(np.int64).tolist()]
    last = len(lengths)
    least: list[float] = [0, *[float("inf")] * last]
    choices: list[list[int]] = []
    for _ in range(last):
        least, chosen = _one_more(least, L, C, S)
        choices.append(chosen)
        found, j = [], last
        for chosen in reversed(choices):
            found.append(L[j])
            j = chosen[j]
        yield tuple(sorted(found)), int(least[last])


def _one_more(least: list[float], L: list[int], C: list[int], S: list[int]) -> tuple[list[float], list[int]]:
    """The least padding up to every length with one bucket more, and where the one before it ends."""
    better, chosen = [float("inf")] * len(L), [0] * len(L)
    lines: list[tuple[int, float, int]] = []  # slope, height at 0, i; only those that are lowest somewhere
    first = 0
    for j in range(1, len(L)):
        if least[j - 1] < float("inf"):
            line = (-C[j - 1], least[j - 1] + S[j - 1], j - 1)
            while len(lines) - first >= 2 and _never_lowest(lines[-2], lines[-1], line):
                lines.pop()
            lines.append(line)
        while len(lines) - first >= 2 and _at(lines[first + 1], L[j]) <= _at(lines[first], L[j]):
            first += 1
        if len(lines) > first:
            better[j] = _at(lines[first], L[j]) + L[j] * C[j] - S[j]
            chosen[j] = lines[first][2]
    return better, chosen


def _at(line: tuple[int, float, int], x: int) -> float:
    return line[1] + line[0] * x


def _never_lowest(a: tuple[int, float, int], b: tuple[int, float, int], c: tuple[int, float, int]) -> bool:
    """Whether b, whose slope is between those of a and c, is nowhere below both."""
    return (c[1] - a[1]) * (a[0] - b[0]) <= (b[1] - a[1]) * (a[0] - c[0])


def best_pairs(rows: NDArray[np.int64], cost: Cost) -> Iterator[tuple[tuple[Pair, ...], float]]:
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
        corners, group = _settled(cells, count, corners, cost)
        order = np.argsort(cost(corners), kind="stable")
        total = float((cost(corners[group]) * count).sum())
        yield tuple((int(p), int(t)) for p, t in corners[order]), total
        if len(corners) == 1:
            return
        weight = np.bincount(group, count, len(corners))
        joined = np.maximum(corners[:, None], corners[None, :])
        own = cost(corners) * weight
        more = cost(joined) * (weight[:, None] + weight[None, :]) - own[:, None] - own[None, :]
        more[np.tril_indices(len(corners))] = np.inf
        one, other = np.unravel_index(int(more.argmin()), more.shape)
        corners[one] = joined[one, other]
        corners = np.delete(corners, other, axis=0)


def _settled(
    cells: NDArray[np.int64], count: NDArray[np.int64], corners: NDArray[np.int64], cost: Cost
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Buckets shrunk to the cells that are cheapest in them, and which each cell is in."""
    least = np.inf
    while True:
        used, group = np.unique(cheapest(cells, corners, cost), return_inverse=True)
        corners = np.zeros((len(used), 2), np.int64)
        np.maximum.at(corners, group, cells)
        total = float((cost(corners[group]) * count).sum())
        if total >= least:
            return corners, group
        least = total


def _fewer(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows rounded up, to quantiles of their lengths, until at most `MOST_CELLS` are different."""
    parts, found = 2 * MOST_CELLS, rows
    while len(np.unique(found, axis=0)) > MOST_CELLS:
        parts = parts * 3 // 4
        shares = np.linspace(0, 1, parts + 1)[1:]
        marks = [np.unique(np.quantile(lengths, shares, method="higher")) for lengths in rows.T]
        found = np.stack([m[np.searchsorted(m, own)] for m, own in zip(marks, rows.T, strict=True)], axis=1)
    return found


# Documents as rows.


class Pieces(NamedTuple):
    """Parts of documents, in the order of documents and from their beginnings on; [P] each.

    A piece of n predictions reads n tokens and, as labels, the token after each of them. So all tokens of a
    document are read, all but the first one are a label once, and the last one is only a label.
    """

    document: NDArray[np.int64]
    begin: NDArray[np.int64]
    size: NDArray[np.int64]  # of its row; int64[P] predictions, or int64[P, 2]


class Rows(NamedTuple):
    """Which pieces each row holds: those at `order[start[r]:start[r + 1]]`, one behind the other."""

    start: NDArray[np.int64]  # [R + 1]
    order: NDArray[np.int64]  # [P]
    size: NDArray[np.int64]  # int64[R] or int64[R, 2]

    def pieces(self, row: int) -> NDArray[np.int64]:
        """Indices of its pieces."""
        return self.order[self.start[row] : self.start[row + 1]]

    def summed(self, each: NDArray[Any]) -> NDArray[Any]:
        """What all pieces of each row have together, given what each piece has."""
        total: NDArray[Any] = np.add.reduceat(each[self.order], self.start[:-1], axis=0)
        return total


def unpack(rows: Rows, which: NDArray[np.bool_], sizes: NDArray[np.int64]) -> Rows:
    """Rows of which some are taken apart: each of their pieces gets a row of its own."""
    each = zip(which, np.split(rows.order, rows.start[1:-1]), strict=True)
    return _rows([part for apart, own in each for part in (own[:, None] if apart else [own])], sizes)


def cut(predictions: NDArray[np.int64], longest: int) -> Pieces:
    """Documents of so many predictions (int64[N], 0 for those left out) as pieces of at most `longest`.

    Of a document that is split all pieces but the last are as long as they may be.
    """
    count = -(-predictions // longest)
    document = np.repeat(np.arange(len(predictions)), count)
    begin = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * longest
    return Pieces(document, begin, np.minimum(predictions[document] - begin, longest))


def one_each(sizes: NDArray[np.int64]) -> Rows:
    """A row for every piece."""
    return Rows(np.arange(len(sizes) + 1), np.arange(len(sizes)), sizes)


def pack(sizes: NDArray[np.int64], most: tuple[int, ...]) -> Rows:
    """Pieces, none longer than `most` in any length, in rows of that: best-fit decreasing."""
    rows = _pack_lengths(sizes, *most) if len(most) == 1 else _pack_pairs(sizes, most)
    return _rows(rows, sizes)


def _rows(rows: Sequence[Sequence[int] | NDArray[np.int64]], sizes: NDArray[np.int64]) -> Rows:
    start = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    order = np.array([piece for row in rows for piece in row], np.int64)
    return Rows(start, order, np.add.reduceat(sizes[order], start[:-1], axis=0))


def _pack_lengths(sizes: NDArray[np.int64], most: int) -> list[list[int]]:
    """The pieces of each row, of one length.

    Pieces are taken from the longest on, equal ones by index, and each is put where the least room stays,
    of equal rows into the one that has been so for the shortest time. Such a packing needs at most 11/9 of
    the fewest possible rows, and one more (Johnson, 1973). O(P log most).
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those in by_room, ascending
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, row = most, len(rows)
            rows.append([])
        rows[row].append(piece)
        if room > size:
            if room - size not in by_room:
                bisect.insort(rooms, room - size)
            by_room.setdefault(room - size, []).append(row)
    return rows


def _pack_pairs(sizes: NDArray[np.int64], most: tuple[int, ...]) -> list[list[int]]:
    """The documents of each row, of two lengths.

    Documents are taken by their larger share of a row, from the largest on, equal ones by index. Each goes
    where the least room stays, added up as shares of both lengths, among the `MOST_OPEN` rows that were begun
    last and hold it.
    """
    share = sizes / np.array(most)
    rows: list[list[int]] = []
    numbers = np.zeros(0, np.int64)
    room = np.zeros((0, 2), np.int64)
    for document in np.argsort(-share.max(axis=1), kind="stable").tolist():
        size = sizes[document]
        left = np.where((room >= size).all(axis=1), ((room - size) / most).sum(axis=1), np.inf)
        at = int(left.argmin()) if len(left) else 0
        if not len(left) or left[at] == np.inf:
            at, keep = min(len(numbers), MOST_OPEN - 1), slice(-MOST_OPEN + 1, None)
            numbers = np.append(numbers[keep], len(rows))
            room = np.append(room[keep], [most], axis=0)
            rows.append([])
        rows[numbers[at]].append(document)
        room[at] -= size
    return rows
