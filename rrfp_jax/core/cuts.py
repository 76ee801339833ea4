"""A row of layers cut into consecutive runs, so that the largest cost of a run is as small as it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

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
