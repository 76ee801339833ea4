"""What layers take, and which stages are slow, from how busy stages were under one split or under several.

One split cannot tell a slow device from heavier layers: it is a matter of what is likelier. A layer that has
moved tells it, since it takes its time along, and leaves a device's slowness behind. So the steps of all
splits are explained together. How busy a virtual stage is, is

    scale of its split x slowness of its stage x sum over its layers of (estimate x its kind's x its own)

Every factor's logarithm is normal around 0, as wide as `SLOWNESS`, `KIND` and `OWN` say, and what is measured
as exact as `PRESENT` and `EARLIER` say. The likeliest factors are found by Gauss-Newton steps on that many
equations as there are virtual stages, so it takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.measure.work import LayerShares, Work
from rrfp_jax.core.tasks import Placement

SLOWNESS = 0.2
"""Of the stages' slowness. Slow devices are rare, so what other layers than blocks can explain is theirs."""

KIND = 1.5
"""Of how wrong estimates are for layers of one name, beside those that most of the time is in."""

OWN = 0.1
"""Of one layer beside others of its name."""

SCALE = 10.0
"""Of a split's steps beside shapes: nothing is known."""

PRESENT, EARLIER = 0.005, 0.02
"""How exact the busy times of the present split and of earlier ones are."""

LEAST = 0.01
"""Of the mean layer's estimate; shapes may say that a layer has nothing to do."""

ROUNDS = 6
"""Gauss-Newton steps; the sums of layers are the only thing that is not linear."""

Row: TypeAlias = list[float]


class Seen(NamedTuple):
    """How busy virtual stages were under a split (s); only ratios count."""

    split: tuple[int, ...]
    busy: Sequence[float]

    @property
    def shares(self) -> list[float]:
        """By virtual stage its part of all."""
        return _shares(self.busy)


def fitted_shares(work: Work, seen: Sequence[Seen], placement: Placement) -> LayerShares:
    """Which layer takes how long on a stage of usual speed, and which stages are slow.

    Args:
        work: of the layers.
        seen: what is known, the present split last; every virtual stage was busy.
        placement: of the virtual stages.
    """
    problem = _Problem(work, seen, placement)
    x = [0.0] * len(problem.spreads)
    for _ in range(ROUNDS):
        x = problem.improved(x)
    return problem.shares(x)


class _Problem:
    """Unknowns, all logarithms: scales by split, slowness by stage, a factor by kind, one by layer."""

    def __init__(self, work: Work, seen: Sequence[Seen], placement: Placement) -> None:
        self._work, self._seen, self._placement = work, seen, placement
        names = list(dict.fromkeys(layer.name for layer in work.layers))
        layers = range(len(work.layers))
        mean = sum(layer.estimate for layer in work.layers) / len(work.layers)
        # A layer that only hands on what it gets still takes the time of a call.
        self._estimates = [max(layer.estimate, LEAST * mean) or 1.0 for layer in work.layers]
        self._stage = len(seen)  # where the stages' begin, and so on
        self._kind = self._stage + placement.stages
        self._layer = self._kind + len(names)
        self._kind_of = [self._kind + names.index(layer.name) for layer in work.layers]
        kinds = [0.0 if name == work.measure else KIND for name in names]
        self.spreads = [*[SCALE] * len(seen), *[SLOWNESS] * placement.stages, *kinds, *[OWN] * len(layers)]
        last = len(seen) - 1
        self._noise = [PRESENT if s == last else EARLIER for s, own in enumerate(seen) for _ in own.busy]

    def improved(self, x: Sequence[float]) -> list[float]:
        """The likeliest unknowns if everything were linear around these."""
        rows, missing = [], []
        for number, own in enumerate(self._seen):
            for v, layers in enumerate(self._work.ranges(own.split)):
                seconds = [self._seconds(i, x) for i in layers]
                whole = sum(seconds)
                row = [0.0] * len(x)
                stage = self._stage + self._placement.place(v)[0]
                row[number] = row[stage] = 1.0
                for i, one in zip(layers, seconds, strict=True):
                    row[self._kind_of[i]] += one / whole
                    row[self._layer + i] += one / whole
                said = x[number] + x[stage] + math.log(whole)
                rows.append(row)
                linear = sum(a * b for a, b in zip(row, x, strict=True))
                missing.append(math.log(own.busy[v]) - said + linear)
        variances = [spread**2 for spread in self.spreads]
        covariance = [[sum(map(_product, a, b, variances)) for b in rows] for a in rows]
        for n, noise in enumerate(self._noise):
            covariance[n][n] += noise**2
        weights = _solved(covariance, missing)
        columns = zip(*rows, strict=True)
        return [v * sum(map(_pair, column, weights)) for v, column in zip(variances, columns, strict=True)]

    def _seconds(self, i: int, x: Sequence[float]) -> float:
        """Of a layer as shapes estimate it, times its kind's factor and its own."""
        return self._estimates[i] * math.exp(x[self._kind_of[i]] + x[self._layer + i])

    def shares(self, x: Sequence[float]) -> LayerShares:
        """What the unknowns say, for the present split."""
        scale = math.exp(x[len(self._seen) - 1])
        seconds = [scale * self._seconds(i, x) for i in range(len(self._work.layers))]
        ranges = self._work.ranges(self._seen[-1].split)
        bytes_of = [layer.held_bytes for layer in self._work.layers]
        return LayerShares(
            of_time=[*chain(*(_shares([seconds[i] for i in layers]) for layers in ranges))],
            of_bytes=[*chain(*(_shares([bytes_of[i] for i in layers]) for layers in ranges))],
            seconds=seconds,
            slowness=[math.exp(own) for own in x[self._stage : self._kind]],
        )


def _product(a: float, b: float, variance: float) -> float:
    return a * b * variance


def _pair(a: float, b: float) -> float:
    return a * b


def _solved(matrix: list[Row], right: Sequence[float]) -> Row:
    """What a positive definite matrix, which is used up, takes to the right side; by Gauss's elimination."""
    values = list(right)
    size = range(len(values))
    for n in size:
        pivot = matrix[n]
        for m in range(n + 1, len(values)):
            factor = matrix[m][n] / pivot[n]
            if factor:
                matrix[m] = [a - factor * b for a, b in zip(matrix[m], pivot, strict=True)]
                values[m] -= factor * values[n]
    for n in reversed(size):
        values[n] = (values[n] - sum(matrix[n][m] * values[m] for m in size[n + 1 :])) / matrix[n][n]
    return values


def _shares(weights: Sequence[float]) -> list[float]:
    whole = sum(weights)
    return [weight / whole if whole else 1 / len(weights) for weight in weights]
