"""Bucket lengths: the few row lengths that all documents are padded to, given or fitted to the data."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How to choose bucket lengths from the lengths of the data; give one of the first two, or both.

    Args:
        buckets: at most so many; without `padding`, with the least padding that so many can have.
        padding: the fewest whose padding is at most this share of all positions.
        longest: no bucket is longer; longer documents are split.
        multiple: lengths are multiples of this.

    Raises:
        UsageError: an impossible setting.
    """

    buckets: int | None = None
    padding: float | None = None
    longest: int
    multiple: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_fit(self, self.buckets, self.padding, longest=self.multiple)

    def lengths(self, rows: NDArray[np.int64]) -> tuple[int, ...]:
        """Bucket lengths for rows of these lengths (int64[N], each from 1 to `longest`), ascending.

        Raises:
            UsageError: the share of padding cannot be had, because of `buckets` or `multiple`.
        """
        least, tokens = self.padding or 0.0, int(rows.sum())
        for found, padding in best_buckets(rows, self.multiple):
            enough = padding <= least * (padding + tokens)
            if enough or len(found) == self.buckets:
                break
        if self.padding is not None and not enough:
            remedy = "more buckets" if len(found) == self.buckets else f"multiple < {self.multiple}"
            raise UsageError(
                f"{self}: {len(found)} buckets still pad {padding / (padding + tokens):.3f}; give {remedy}"
            )
        return found


def best_buckets(rows: NDArray[np.int64], multiple: int = 1) -> Iterator[tuple[tuple[int, ...], int]]:
    """The best one bucket, the best two, and so on: (ascending lengths, tokens of padding).

    Exact: of all choices of k lengths, one with the least padding. With D different row lengths, in units of
    `multiple`, each further bucket takes O(D) time and memory. Let C and S be the number and the summed
    tokens of rows up to a length. The least padding of rows up to L[j] with one bucket more is

        min over i < j of least[i] + L[j] (C[j] - C[i]) - (S[j] - S[i]),

    for every j the lowest of the lines least[i] + S[i] - C[i] x at x = L[j]. Slopes fall with i and x rises
    with j, so a lower envelope of lines that is built and read from left to right gives all of them.
    """
    rounded = -(-rows // multiple) * multiple
    lengths, where = np.unique(rounded, return_inverse=True)
    L = [0, *lengths.tolist()]
    C = [0, *np.cumsum(np.bincount(where)).tolist()]
    sums = np.zeros(len(lengths), np.int64)
    np.add.at(sums, where, rows)
    S = [0, *np.cumsum(sums).tolist()]
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


def _one_more(
    least: Sequence[float], L: Sequence[int], C: Sequence[int], S: Sequence[int]
) -> tuple[list[float], list[int]]:
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


def check_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Configured bucket lengths, ascending.

    Raises:
        UsageError: none, one below 1, or one twice.
    """
    found = tuple(sorted(lengths))
    if not found or found[0] < 1 or len(set(found)) < len(found):
        raise UsageError(f"lengths={tuple(lengths)}: give different bucket lengths of at least 1")
    return found


def bucket_of(length: int, lengths: Sequence[int]) -> int:
    """The index of the smallest of the ascending bucket lengths that holds a row.

    Raises:
        UsageError: none does; names the nearest.
    """
    bucket = bisect.bisect_left(lengths, length)
    if length < 1 or bucket == len(lengths):
        near = lengths[0] if length < 1 else lengths[-1]
        raise UsageError(
            f"a row of {length} tokens fits no bucket of {tuple(lengths)}; the nearest is {near}. Give a "
            f"bucket that holds it, or cut it"
        )
    return bucket


def check_fit(fit: Any, buckets: int | None, padding: float | None, **multiples: int) -> None:
    """Refuse what no buckets can be fitted by.

    Args:
        fit: the settings, which messages show.
        buckets, padding: how many, and how much; see `Fit`.
        multiples: by name of a longest length of `fit`, of what it must be a multiple.

    Raises:
        UsageError: an impossible setting.
    """
    if buckets is None and padding is None:
        raise UsageError(f"{fit}: give a number of buckets, a share of padding, or both")
    if buckets is not None and buckets < 1:
        raise UsageError(f"{fit}: give at least one bucket")
    if padding is not None and not 0 <= padding < 1:
        raise UsageError(f"{fit}: padding is a share, from 0 to below 1")
    for name, multiple in multiples.items():
        longest = getattr(fit, name)
        if multiple < 1 or longest < 1 or longest % multiple:
            raise UsageError(f"{fit}: {name} must be a positive multiple of {multiple}")
