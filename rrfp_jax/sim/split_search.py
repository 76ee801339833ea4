"""Which splits of a model's layers a run could go on with, and what its steps would take with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.cuts import least_largest
from rrfp_jax.core.measure.recorded_step import RecordedStep
from rrfp_jax.core.measure.replayed import Replay, replay_of
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.recut import Layers

Split: TypeAlias = tuple[int, ...]
"""Numbers of layers, by virtual stage."""

NEAR = 1.05
"""Splits whose busiest stage has no more than so many times the least to do are tried."""


class Repeatable(NamedTuple):
    """A step that ran, and what to run it again with."""

    step: RecordedStep
    replay: Replay

    @classmethod
    def of(cls, steps: Sequence[RecordedStep]) -> list[Repeatable]:
        """Each of these."""
        return [cls(step, replay_of(step.trace)) for step in steps]


def screen(layers: Layers) -> float:
    """By which share the busiest stage could have less to do; no split gains much more."""
    busy = _busiest(layers)
    return 1.0 - busy(least(layers)) / busy(layers.work.split)


def tried(layers: Layers) -> Iterator[Split]:
    """The split whose busiest virtual stage has least to do, those beside it, and one layer moved.

    Those come first whose busiest stage has least to do.
    """
    busy, best = _busiest(layers), least(layers)
    found = {best: None}
    for v in range(len(best) - 1):
        for more in (1, -1):
            other = list(best)
            other[v], other[v + 1] = other[v] + more, other[v + 1] - more
            if min(other) > 0 and busy(other) <= NEAR * busy(best):
                found[tuple(other)] = None
    found |= {recut.split: None for recut in layers.recuts()}
    found.pop(tuple(layers.work.split), None)
    yield from sorted(found, key=busy)


def simulated(steps: Sequence[Repeatable], layers: Layers, split: Split) -> float:
    """What these steps would take in all with a split; infinite if one cannot run with it."""
    whole = 0.0
    for step, replay in steps:
        costs, other = layers.recut(step, replay.costs, split)
        try:
            trace = simulate(step.rules, costs, budgets=other.budgets, lead=step.lead, leads=replay.leads)
        except (ValueError, RuntimeError):  # it does not fit
            return inf
        whole += trace.makespan
    return whole


def _busiest(layers: Layers) -> Callable[[Sequence[int]], float]:
    """What the busiest stage computes with a split."""

    def busy(split: Sequence[int]) -> float:
        found = [0.0] * layers.placement.stages
        for v, own in enumerate(layers.work.ranges(split)):
            stage = layers.placement.place(v)[0]
            found[stage] += layers.shares.slowness[stage] * sum(layers.shares.seconds[own.start : own.stop])
        return max(found)

    return busy


def least(layers: Layers) -> Split:
    """The split whose busiest virtual stage has least to do."""
    until = [0.0, *accumulate(layers.shares.seconds)]
    slowness = [layers.shares.slowness[layers.placement.place(v)[0]] for v in range(len(layers.work.split))]

    def seconds(v: int, first: int, end: int) -> float:
        return slowness[v] * (until[end] - until[first])

    _, best = least_largest(seconds, len(layers.work.layers), len(layers.work.split))
    return tuple(best)
