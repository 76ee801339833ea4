"""Which layers go to which stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import UsageError


def layers_of_chunks(layers: int, placement: Placement, split: Sequence[int] | None) -> list[list[range]]:
    """By stage, the layers of each of its chunks.

    Raises:
        UsageError: fewer layers than virtual stages, or a split that does not add up.
    """
    virtual_stages, what = placement.last + 1, "stage"
    if placement.chunks > 1:
        what = f"chunk of each of {placement.stages} stages"
    if virtual_stages > layers:
        many = (
            f"{virtual_stages} stages"
            if placement.chunks == 1
            else f"{placement.chunks} chunks on {placement.stages} stages"
        )
        raise UsageError(
            f"{many} for {layers} layers: each {what} needs at least one; use at most {layers} in all"
        )
    if split is None:
        split = split_evenly(layers, virtual_stages)
    whole = all(isinstance(size, (int, np.integer)) for size in split)
    if not whole or len(split) != virtual_stages or sum(split) != layers or min(split) < 1:
        raise UsageError(
            f"split={list(split)}: give {virtual_stages} positive whole numbers of layers, one per {what}, "
            f"in the model's order, that add up to {layers}"
        )
    ends = np.cumsum(split).tolist()
    ranges = [range(end - size, end) for end, size in zip(ends, split, strict=True)]
    return [
        [ranges[placement.virtual_stage(s, c)] for c in range(placement.chunks)]
        for s in range(placement.stages)
    ]


def split_evenly(layers: int, stages: int) -> list[int]:
    """Numbers of layers per stage that differ by at most one; the longer stages stand at the ends.

    The first and the last layer are usually an embedding and a head, cheaper than the blocks between them:
    embedding, 8 blocks and head on 4 stages give 3, 2, 2, 3, so that each stage has 2 blocks.
    """
    short, longer = divmod(layers, stages)
    from_ends = sorted(range(stages), key=lambda s: min(s, stages - 1 - s))
    return [short + (s in from_ends[:longer]) for s in range(stages)]
