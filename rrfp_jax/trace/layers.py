"""Which layer of a model takes how long, and on which stages the same work takes longer.

From the shapes of layers and how busy stages were, in two ways. `layer_shares` looks at one step, for
reports. What shapes say is right for layers that are alike, and may be off for others. So the layers that
most of the time is in, the blocks, are the measure: virtual stages that consist of nothing else should take
as long as shapes say beside each other. One that takes longer is on a slow device. In other virtual stages
the rest of the time is for the other layers, up to `FURTHEST` times what shapes say of them.

`fitted_shares` looks at steps under several splits, for rebalancing. One split cannot tell a slow device from
heavier layers: it is a matter of what is likelier. A layer that has moved tells it, since it takes its time
along, and leaves a device's slowness behind. So the steps of all splits are explained together. How busy a
virtual stage is, is

    scale of its split x slowness of its stage x sum over its layers of (estimate x its kind's x its own)

Every factor's logarithm is normal around 0, as wide as `SLOWNESS`, `KIND` and `OWN` say, and what is measured
as exact as `PRESENT` and `EARLIER` say. The likeliest factors are found by Gauss-Newton steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from statistics import fmean, median_low
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.tasks import Placement
from rrfp_jax.trace.records import StepTrace

FURTHEST = 3.0
"""So many times as long as shapes say, beside the blocks, an embedding or a loss may take."""


class LayerWork(NamedTuple):
    """One layer.

    Attributes:
        name: as others of its kind are called.
        estimate: what shapes and a data sheet say that a microbatch takes, forward and backward (s); only
            ratios of it count.
        held_bytes: of a microbatch, from its forward to its backward.
        lasting_bytes: by which the room for microbatches of the stage that it is on is smaller.
    """

    name: str
    estimate: float
    held_bytes: int
    lasting_bytes: int = 0


@dataclass(frozen=True)
class Work:
    """A model's layers in order, and how many of them each virtual stage has."""

    layers: Sequence[LayerWork]
    split: Sequence[int]

    def ranges(self, split: Sequence[int] | None = None) -> list[range]:
        """By virtual stage the indices of its layers, in this split or in another one."""
        sizes = self.split if split is None else split
        return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]

    @cached_property
    def virtual_stage_of(self) -> list[int]:
        """By layer."""
        return [v for v, layers in enumerate(self.ranges()) for _ in layers]

    @cached_property
    def measure(self) -> str:
        """The name of the layers that most of the time is in."""
        seconds: dict[str, float] = defaultdict(float)
        for layer in self.layers:
            seconds[layer.name] += layer.estimate
        return max(seconds, key=seconds.__getitem__)


@dataclass(frozen=True)
class LayerShares:
    """How the time of a pipeline's stages comes about.

    Attributes:
        of_time, of_bytes: by layer, its share of what its virtual stage takes and holds.
        seconds: by layer, what it takes on a stage that is not slow.
        slowness: by stage, how many times as long the same work takes there.
    """

    of_time: Sequence[float]
    of_bytes: Sequence[float]
    seconds: Sequence[float]
    slowness: Sequence[float]


def busy_seconds(steps: Sequence[StepTrace]) -> dict[int, float]:
    """What each virtual stage computed in all of these steps (s)."""
    busy: dict[int, float] = defaultdict(float)
    for trace in steps:
        for record in trace.records:
            busy[trace.placement.virtual_stage(record.stage, record.task.chunk)] += record.end - record.start
    return busy


def layer_shares(work: Work, busy: Mapping[int, float], placement: Placement) -> LayerShares:
    """Which layer takes how long."""
    ranges = work.ranges()
    stage_of = [placement.place(v)[0] for v in range(len(ranges))]
    parts = [_Part.of([work.layers[i] for i in layers], work.measure) for layers in ranges]
    rates = [busy[v] / part.measured for v, part in enumerate(parts) if part.measured and not part.others]
    usual = median_low(rates) if len(rates) > 1 else None
    found: dict[int, list[float]] = defaultdict(list)
    for v, part in enumerate(parts):
        found[stage_of[v]].append(1.0 if usual is None else part.slowness(busy[v], usual))
    slowness = [fmean(found[stage]) for stage in range(placement.stages)]
    of_time, of_bytes, seconds = [], [], []
    for v, (layers, part) in enumerate(zip(ranges, parts, strict=True)):
        own = [work.layers[i] for i in layers]
        slow = slowness[stage_of[v]]
        scale = 1.0 if usual is None else part.scale_of_others(busy[v] / slow, usual)
        shares = shares_of([one.estimate * (1.0 if one.name == work.measure else scale) for one in own])
        of_time += shares
        of_bytes += shares_of([layer.held_bytes for layer in own])
        seconds += [share * busy[v] / slow for share in shares]
    return LayerShares(of_time, of_bytes, seconds, slowness)


class _Part(NamedTuple):
    """What shapes say of a virtual stage: of its layers that are the measure, and of its others (s)."""

    measured: float
    others: float

    @classmethod
    def of(cls, layers: Sequence[LayerWork], measure: str) -> _Part:
        own = [layer.estimate for layer in layers if layer.name == measure]
        return cls(sum(own), sum(layer.estimate for layer in layers) - sum(own))

    def slowness(self, busy: float, usual: float) -> float:
        """How many times as long it takes as it should, if other layers take what they can.

        Args:
            busy: what it took (s).
            usual: seconds that the measure takes for one that shapes say.
        """
        if not self.others:
            return busy / (usual * self.measured) if self.measured else 1.0
        most = usual * (self.measured + FURTHEST * self.others)
        return max(busy / most, 1.0)

    def scale_of_others(self, busy: float, usual: float) -> float:
        """How much longer other layers take, beside the measure, than shapes say."""
        rest = busy - usual * self.measured
        return max(rest / (usual * self.others), 0.0) if self.others and self.measured else 1.0


def shares_of(weights: Sequence[float]) -> list[float]:
    """As shares that add up to 1; equal ones if all are zero."""
    whole = sum(weights)
    return [weight / whole if whole else 1 / len(weights) for weight in weights]


SLOWNESS = 0.2
"""Of the stages' slowness. Slow devices are rare, so what other layers than blocks can explain is theirs."""

KIND = 1.5
"""Of how wrong estimates are for layers of one name, beside those that most of the time is in."""

OWN = 0.1
"""Of one layer beside others of its name."""

KNOWN = 1e-6
"""Of those layers, which are the measure."""

SCALE = 10.0
"""Of a split's steps beside shapes: nothing is known."""

PRESENT, EARLIER = 0.005, 0.02
"""How exact the busy times of the present split and of earlier ones are."""

LEAST = 0.01
"""Of the mean layer's estimate; shapes may say that a layer has nothing to do."""

ROUNDS = 6
"""Gauss-Newton steps; the sums of layers are the only thing that is not linear."""


class BusySample(NamedTuple):
    """How busy virtual stages were under a split (s); only ratios count."""

    split: tuple[int, ...]
    busy: Sequence[float]

    @property
    def shares(self) -> list[float]:
        """By virtual stage its part of all."""
        return shares_of(self.busy)


def fitted_shares(work: Work, seen: Sequence[BusySample], placement: Placement) -> LayerShares:
    """Which layer takes how long, and which stages are slow; the present split is the last one seen."""
    problem = _Problem(work, seen, placement)
    x = [0.0] * len(problem.spreads)
    for _ in range(ROUNDS):
        x = problem.improved(x)
    return problem.shares(x)


class _Problem:
    """Unknowns, all logarithms: one by layer, a factor by kind, slowness by stage, scales by split."""

    def __init__(self, work: Work, seen: Sequence[BusySample], placement: Placement) -> None:
        self._work, self._seen, self._placement = work, seen, placement
        names = list(dict.fromkeys(layer.name for layer in work.layers))
        mean = sum(layer.estimate for layer in work.layers) / len(work.layers)
        # A layer that only hands on what it gets still takes the time of a call.
        self._estimates = [max(layer.estimate, LEAST * mean) or 1.0 for layer in work.layers]
        kind = len(work.layers)  # where the kinds' begin, and so on
        self._stage = kind + len(names)
        self._scale = self._stage + placement.stages
        self._kind_of = [kind + names.index(layer.name) for layer in work.layers]
        kinds = [KNOWN if name == work.measure else KIND for name in names]
        slowness, scales = [SLOWNESS] * placement.stages, [SCALE] * len(seen)
        self.spreads = [*[OWN] * len(work.layers), *kinds, *slowness, *scales]

    def improved(self, x: Sequence[float]) -> list[float]:
        """The likeliest unknowns if everything were linear around these."""
        import numpy as np  # here, as whoever simulates needs none

        spreads, rows, right = np.array(self.spreads), [], []
        for number, own in enumerate(self._seen):
            exact = PRESENT if number == len(self._seen) - 1 else EARLIER
            for v, layers in enumerate(self._work.ranges(own.split)):
                known, said = self._row(number, v, layers, x)
                row = np.zeros(len(x))
                row[[*known]] = [*known.values()]
                right.append((math.log(own.busy[v]) - said + row @ np.array(x)) / exact)
                rows.append(row * spreads / exact)
        matrix = np.array(rows)
        found = np.linalg.solve(np.eye(len(x)) + matrix.T @ matrix, matrix.T @ np.array(right))
        return [float(one) for one in found * spreads]

    def _row(self, number: int, v: int, layers: range, x: Sequence[float]) -> tuple[dict[int, float], float]:
        """By unknown what it does to the logarithm of how busy a virtual stage is; and that itself."""
        seconds = [self._seconds(i, x) for i in layers]
        whole = sum(seconds)
        scale, stage = self._scale + number, self._stage + self._placement.place(v)[0]
        row = {scale: 1.0, stage: 1.0}
        for i, one in zip(layers, seconds, strict=True):
            row[i] = one / whole
            row[self._kind_of[i]] = row.get(self._kind_of[i], 0.0) + one / whole
        return row, x[scale] + x[stage] + math.log(whole)

    def _seconds(self, i: int, x: Sequence[float]) -> float:
        """Of a layer as shapes estimate it, times its kind's factor and its own."""
        return self._estimates[i] * math.exp(x[self._kind_of[i]] + x[i])

    def shares(self, x: Sequence[float]) -> LayerShares:
        """What the unknowns say, for the present split."""
        scale = math.exp(x[-1])
        seconds = [scale * self._seconds(i, x) for i in range(len(self._work.layers))]
        ranges = self._work.ranges(self._seen[-1].split)
        bytes_of = [layer.held_bytes for layer in self._work.layers]
        return LayerShares(
            of_time=[*chain(*(shares_of([seconds[i] for i in layers]) for layers in ranges))],
            of_bytes=[*chain(*(shares_of([bytes_of[i] for i in layers]) for layers in ranges))],
            seconds=seconds,
            slowness=[math.exp(own) for own in x[self._stage : self._scale]],
        )


Cost: TypeAlias = Callable[[int, int, int], float]
"""(virtual stage, first layer, end) -> what is to be small."""


def least_largest(cost: Cost, layers: int, virtual_stages: int) -> tuple[float, list[int]]:
    """The least possible largest cost of a virtual stage, and the numbers of layers that have it."""
    best = [0.0, *[math.inf] * layers]  # by number of layers in the virtual stages so far
    cuts: list[list[int]] = []  # where the last of them begins
    for virtual_stage in range(virtual_stages):
        after, cut = [math.inf] * (layers + 1), [virtual_stage] * (layers + 1)
        for end in range(virtual_stage + 1, layers - (virtual_stages - virtual_stage - 1) + 1):
            for first in range(virtual_stage, end):
                if best[first] < after[end]:  # else no cost could make it better
                    value = max(best[first], cost(virtual_stage, first, end))
                    if value < after[end]:
                        after[end], cut[end] = value, first
        best = after
        cuts.append(cut)
    split, end = [], layers
    for cut in reversed(cuts):
        split.append(end - cut[end])
        end = cut[end]
    return best[layers], split[::-1]
