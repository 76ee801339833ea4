"""What rows cost, and two uses of it: microbatches of even cost, and an order of a step's microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, shown

Order: TypeAlias = Literal["drawn", "longest", "shortest", "zigzag"]
"""As drawn, by falling or rising cost, or the dearest and the cheapest of those left in turn."""

ORDERS: tuple[Order, ...] = get_args(Order)


class Cost(Protocol):
    """Costs of documents (or of padded rows) by their tokens, in any unit; float64[...]."""

    def __call__(self, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """One each."""
        ...


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
    """Measured costs, `((tokens, cost), ...)`, with straight lines between and, prolonged, beyond them."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        try:
            points = np.array(self.points, np.float64)
        except (ValueError, TypeError, OverflowError):
            raise UsageError(f"points={shown(self.points)}: give pairs of numbers, (tokens, cost)") from None
        few = points.ndim != 2 or len(points) < 2
        if (
            few
            or not np.isfinite(points).all()
            or (np.diff(points, axis=0) < [1, 0]).any()
            or points[0, 1] <= 0
        ):
            raise UsageError(
                f"{self}: give at least two points: more and more tokens, positive costs that never fall"
            )

    def __call__(self, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """Interpolate."""
        x, y = np.array(self.points, np.float64).T
        n = np.asarray(tokens, np.float64)
        at = np.clip(np.searchsorted(x, n), 1, len(x) - 1)
        slope = (y[at] - y[at - 1]) / (x[at] - x[at - 1])
        cost: NDArray[np.float64] = np.maximum(y[at - 1] + (n - x[at - 1]) * slope, 0.0)
        return cost


def rows_by_tokens(lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """How many rows of each bucket length make at most so many tokens; at least one."""
    return tuple(max(1, tokens // length) for length in lengths)


def rows_by_cost(lengths: Sequence[int], longest: int, cost: Cost) -> tuple[int, ...]:
    """As many rows of each bucket as cost about the same as so many of the longest one; at least one."""
    each = cost(np.array(lengths))
    return tuple(max(1, round(longest * float(each[-1] / one))) for one in each)


def even_out(costs: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """Deal N = bins x k items into bins of k each so that the bins' costs are about equal; int64[bins, k].

    From the dearest on, each item goes to the cheapest bin that has room (longest processing time first);
    ties by index. Items within a bin are in ascending order.
    """
    room = len(costs) // bins
    dealt: list[list[int]] = [[] for _ in range(bins)]
    total = [0.0] * bins
    for item in np.argsort(-costs, kind="stable").tolist():
        to = min((b for b in range(bins) if len(dealt[b]) < room), key=lambda b: total[b])
        dealt[to].append(item)
        total[to] += float(costs[item])
    return np.array([sorted(items) for items in dealt], np.int64)


def ordered(costs: Sequence[float], order: Order) -> list[int]:
    """Indices of a step's microbatches in the order asked for; ties as drawn."""
    if order == "drawn":
        return list(range(len(costs)))
    falling = sorted(range(len(costs)), key=lambda j: -costs[j])
    if order == "longest":
        return falling
    if order == "shortest":
        return sorted(range(len(costs)), key=lambda j: costs[j])
    return [falling[i // 2] if i % 2 == 0 else falling[-1 - i // 2] for i in range(len(costs))]
