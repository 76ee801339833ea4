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

from rrfp_jax.runtime.sizes import in_words
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
    """No cut keeps within the budget of each virtual stage.

    Attributes:
        split: the cut whose largest virtual stage needs least.
    """

    def __init__(self, split: Sequence[int], virtual_stage: int, needed: int, budget: int) -> None:
        first, end = (sum(split[: virtual_stage + more]) for more in (0, 1))
        super().__init__(
            f"no split into {len(split)} virtual stages fits: even the best, {list(split)}, leaves "
            f"virtual stage {virtual_stage} (layers {first} to {end - 1}) with {in_words(needed)} of "
            f"{in_words(budget)}"
        )
        self.split = split


def partition(layers: Sequence[LayerLoad], in_flight: Sequence[int], budget: int | None = None) -> list[int]:
    """Numbers of layers per virtual stage: the largest time of a virtual stage is as small as it can be.

    Of several such cuts, one whose largest number of bytes is smallest. `in_flight` says how many
    microbatches each virtual stage holds at once, `budget` how many bytes none may exceed; `TooLarge` if no
    cut keeps to that.
    """
    if len(layers) < len(in_flight):
        raise ValueError(f"{len(layers)} layers cannot be split into {len(in_flight)} virtual stages")
    seconds = [0.0, *accumulate(layer.seconds for layer in layers)]
    fixed = [0, *accumulate(layer.fixed_bytes for layer in layers)]
    held = [0, *accumulate(layer.held_bytes for layer in layers)]
    transient = [layer.transient_bytes for layer in layers]
    largest = [[0, *accumulate(transient[first:], max)] for first in range(len(layers))]
    limit = math.inf if budget is None else budget

    def needed(v: int, first: int, end: int) -> float:
        in_all = fixed[end] - fixed[first] + in_flight[v] * (held[end] - held[first])
        return in_all + largest[first][end - first]

    def time(v: int, first: int, end: int) -> float:
        return seconds[end] - seconds[first] if needed(v, first, end) <= limit else math.inf

    def needed_if_fast(v: int, first: int, end: int) -> float:
        return needed(v, first, end) if time(v, first, end) <= slowest else math.inf

    slowest, _ = least_largest(time, len(layers), len(in_flight))
    if slowest < math.inf:
        return least_largest(needed_if_fast, len(layers), len(in_flight))[1]
    assert budget is not None
    least, split = least_largest(needed, len(layers), len(in_flight))
    sizes = [needed(v, end - n, end) for v, (n, end) in enumerate(zip(split, accumulate(split), strict=True))]
    raise TooLarge(split, sizes.index(least), int(least), budget)
