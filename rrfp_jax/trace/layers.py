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
    """One layer; others of its kind have its name."""

    name: str
    estimate: float  # by shapes and a data sheet, of a microbatch (s); only ratios count
    held_bytes: int  # of a microbatch, from its forward to its backward
    lasting_bytes: int = 0  # by which its stage has less room for microbatches


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
        return [v for v, layers in enumerate(self.ranges()) for _ in layers]

    @cached_property
    def measure(self) -> str:
        """The name of the layers that most of the time is in."""
        seconds: dict[str, float] = defaultdict(float)
        for layer in self.layers:
            seconds[layer.name] += layer.estimate
        return max(seconds, key=seconds.__getitem__)


class LayerShares(NamedTuple):
    """How the time of a pipeline's stages comes about."""

    of_time: Sequence[float]  # by layer, its share of what its virtual stage takes
    of_bytes: Sequence[float]  # by layer, its share of what that holds
    seconds: Sequence[float]  # by layer, on a stage that is not slow
    slowness: Sequence[float]  # by stage, how many times as long the same work takes


def busy_seconds(steps: Sequence[StepTrace]) -> dict[int, float]:
    """What each virtual stage computed in all of these steps (s)."""
    busy: dict[int, float] = defaultdict(float)
    for trace in steps:
        for record in trace.records:
            busy[trace.placement.virtual_stage(record.stage, record.task.chunk)] += record.end - record.start
    return busy


def layer_shares(work: Work, busy: Mapping[int, float], placement: Placement) -> LayerShares:
    """Which layer takes how long, from how busy virtual stages were in one step."""
    parts = [[work.layers[i] for i in layers] for layers in work.ranges()]
    stage_of = [placement.place(v)[0] for v in range(len(parts))]
    measured = [sum(one.estimate for one in part if one.name == work.measure) for part in parts]
    others = [sum(one.estimate for one in part if one.name != work.measure) for part in parts]
    rates, found = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)  # by stage
    for v in range(len(parts)):
        if measured[v] and not others[v]:
            rates[stage_of[v]].append(busy[v] / measured[v])
    # Seconds of the measure for one that shapes say: by stage, as chunks of one may take unequally long.
    usual = median_low(map(fmean, rates.values())) if sum(map(len, rates.values())) > 1 else None
    for v, stage in enumerate(stage_of):
        if usual is None:
            found[stage].append(1.0)
        elif others[v]:
            found[stage].append(max(busy[v] / (usual * (measured[v] + FURTHEST * others[v])), 1.0))
        else:
            found[stage].append(busy[v] / (usual * measured[v]) if measured[v] else 1.0)
    slowness = [fmean(found[stage]) for stage in range(placement.stages)]
    of_time, of_bytes, seconds = [], [], []
    for v, part in enumerate(parts):
        fast, scale = busy[v] / slowness[stage_of[v]], 1.0
        if usual is not None and others[v] and measured[v]:
            scale = max((fast - usual * measured[v]) / (usual * others[v]), 0.0)
        shares = shares_of([one.estimate * (1.0 if one.name == work.measure else scale) for one in part])
        of_time += shares
        of_bytes += shares_of([one.held_bytes for one in part])
        seconds += [share * fast for share in shares]
    return LayerShares(of_time, of_bytes, seconds, slowness)


def shares_of(weights: Sequence[float]) -> list[float]:
    """Weights as shares that add up to 1; equal shares if all are zero."""
    whole = sum(weights)
    return [weight / whole if whole else 1 / len(weights) for weight in weights]


SLOWNESS = 0.2
"""Width for a stage's slowness: slow devices are rare, so layers other than blocks explain what they can."""

KIND = 1.5
"""Width for the error of estimates of layers of one name, relative to the layers with most of the time."""

OWN = 0.1
"""Width for one layer relative to others of its name."""

KNOWN = 1e-6
"""Width for the layers with most of the time, to which the others are compared."""

SCALE = 10.0
"""Width for a split's steps relative to what shapes say: nothing is known."""

PRESENT, EARLIER = 0.005, 0.02
"""How exact the busy times of the present split and of earlier ones are."""

LEAST = 0.01
"""Smallest share of the mean layer's estimate; shapes may say that a layer has nothing to do."""

ROUNDS = 6
"""Gauss-Newton steps; the sums of layers are the only thing that is not linear."""


class BusySample(NamedTuple):
    """How busy virtual stages were under a split (s); only ratios count."""

    split: tuple[int, ...]
    busy: Sequence[float]


def fitted_shares(work: Work, seen: Sequence[BusySample], placement: Placement) -> LayerShares:
    """Which layer takes how long, and which stages are slow; the present split is the last one seen."""
    import numpy as np  # here, as whoever simulates needs none

    names = list(dict.fromkeys(layer.name for layer in work.layers))
    count, stages = len(work.layers), placement.stages
    mean = sum(layer.estimate for layer in work.layers) / count
    # A layer that only hands on what it gets still takes the time of a call.
    estimates = np.array([max(layer.estimate, LEAST * mean) or 1.0 for layer in work.layers])
    kinds = np.array([count + names.index(layer.name) for layer in work.layers])
    stage_at, scale_at = count + len(names), count + len(names) + stages  # unknowns, all logarithms
    of_kinds = [KNOWN if name == work.measure else KIND for name in names]
    spreads = np.array([OWN] * count + of_kinds + [SLOWNESS] * stages + [SCALE] * len(seen))
    x = np.zeros(len(spreads))
    for _ in range(ROUNDS):  # the likeliest unknowns if everything were linear around these
        seconds = estimates * np.exp(x[kinds] + x[:count])
        rows, right = [], []
        for number, own in enumerate(seen):
            exact = PRESENT if number == len(seen) - 1 else EARLIER
            for v, layers in enumerate(work.ranges(own.split)):
                here = slice(layers.start, layers.stop)
                whole, row = seconds[here].sum(), np.zeros(len(x))
                row[here] = seconds[here] / whole
                np.add.at(row, kinds[here], row[here])
                ends = [stage_at + placement.place(v)[0], scale_at + number]
                row[ends] = 1.0
                right.append((math.log(own.busy[v] / whole) - x[ends].sum() + row @ x) / exact)
                rows.append(row * spreads / exact)
        matrix = np.array(rows)
        x = spreads * np.linalg.solve(np.eye(len(x)) + matrix.T @ matrix, matrix.T @ np.array(right))
    found = np.exp(x[-1]) * estimates * np.exp(x[kinds] + x[:count])
    ranges = work.ranges(seen[-1].split)
    return LayerShares(
        of_time=[*chain(*(shares_of([float(found[i]) for i in layers]) for layers in ranges))],
        of_bytes=[*chain(*(shares_of([work.layers[i].held_bytes for i in layers]) for layers in ranges))],
        seconds=found.tolist(),
        slowness=np.exp(x[stage_at:scale_at]).tolist(),
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
