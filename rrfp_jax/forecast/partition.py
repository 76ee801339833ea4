"""Cutting a row of layers into consecutive virtual stages so that the slowest virtual stage takes least.

    phase 1     the least that the largest time of a virtual stage can be, over all cuts within the budget
    phase 2     among the cuts that reach it, the least that the largest number of bytes can be

Each phase is a dynamic programme over (virtual stages so far, layers so far). Only the largest value of a
prefix counts, so each one is exact. One programme for both at once would not be exact: a prefix that is
slower, but not the slowest of all, may need fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rrfp_jax.trace.layers import least_largest


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """What one layer puts on the device that it is on.

    Attributes:
        seconds: of a step, all microbatches.
        fixed_bytes: whatever the microbatches are: weights, optimizer state, gradient accumulators.
        held_bytes: of each microbatch in flight.
        transient_bytes: while a program runs; of a virtual stage the largest of its layers counts.
    """

    seconds: float
    fixed_bytes: int = 0
    held_bytes: int = 0
    transient_bytes: int = 0


class TooLarge(ValueError):
    """No cut keeps within the budget.

    Attributes:
        split: the cut whose largest virtual stage needs least.
        virtual_stage, bytes: that virtual stage, and its need.
        budget: what each may have.
    """

    def __init__(self, split: Sequence[int], virtual_stage: int, needed: int, budget: int) -> None:
        super().__init__(
            f"no split into {len(split)} virtual stages keeps within {budget} bytes each: the best, "
            f"{list(split)}, needs {needed} for virtual stage {virtual_stage}"
        )
        self.split, self.virtual_stage, self.bytes, self.budget = split, virtual_stage, needed, budget


def partition(layers: Sequence[LayerLoad], in_flight: Sequence[int], budget: int | None = None) -> list[int]:
    """Numbers of layers per virtual stage: the largest time of a virtual stage is as small as it can be.

    Of several such cuts, one whose largest number of bytes is smallest. `in_flight` says how many
    microbatches each virtual stage holds at once, `budget` how many bytes none may exceed; `TooLarge` if no
    cut keeps to that.
    """
    if not 0 < len(in_flight) <= len(layers):
        raise ValueError(f"{len(layers)} layers for {len(in_flight)} virtual stages: each needs at least one")
    loads, limit = _Loads(layers, in_flight), math.inf if budget is None else budget

    def time(v: int, first: int, end: int) -> float:
        return loads.seconds(first, end) if loads.bytes(v, first, end) <= limit else math.inf

    def bytes_if_fast(v: int, first: int, end: int) -> float:
        return loads.bytes(v, first, end) if time(v, first, end) <= slowest else math.inf

    slowest, _ = least_largest(time, len(layers), len(in_flight))
    if slowest < math.inf:
        return least_largest(bytes_if_fast, len(layers), len(in_flight))[1]
    assert budget is not None
    needed, split = least_largest(loads.bytes, len(layers), len(in_flight))
    ends = accumulate(split)
    sizes = [loads.bytes(v, end - n, end) for v, (n, end) in enumerate(zip(split, ends, strict=True))]
    raise TooLarge(split, sizes.index(needed), int(needed), budget)


class _Loads:
    """What layers `first` to `end` - 1 come to as a virtual stage."""

    def __init__(self, layers: Sequence[LayerLoad], in_flight: Sequence[int]) -> None:
        self._in_flight = in_flight
        self._seconds = [0.0, *accumulate(layer.seconds for layer in layers)]
        self._fixed = [0, *accumulate(layer.fixed_bytes for layer in layers)]
        self._held = [0, *accumulate(layer.held_bytes for layer in layers)]
        transient = [layer.transient_bytes for layer in layers]
        self._transient = [[0, *accumulate(transient[first:], max)] for first in range(len(layers))]

    def seconds(self, first: int, end: int) -> float:
        return self._seconds[end] - self._seconds[first]

    def bytes(self, virtual_stage: int, first: int, end: int) -> float:
        held = self._in_flight[virtual_stage] * (self._held[end] - self._held[first])
        return self._fixed[end] - self._fixed[first] + held + self._transient[first][end - first]
