"""Layers that move to other stages between two steps, with their state of the optimizer.

A leaf's name says nothing of stages, so which leaves a stage lacks after a move, and who has them, follows
from both splits. A leaf goes as its shards lie: from each device to its like on the other stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.stages.held import Held, Leaf
from rrfp_jax.runtime.stages.ties import Exchange


class Way(NamedTuple):
    """A leaf that goes from one stage to another."""

    leaf: Leaf
    source: int
    target: int


def ways(before: Sequence[Collection[Leaf]], after: Sequence[Collection[Leaf]]) -> list[Way]:
    """What each stage lacks of what it will have, from the first stage that has it; layer by layer.

    Args:
        before, after: by stage, its leaves.
    """
    has: dict[Leaf, int] = {}
    for stage, own in enumerate(before):
        for leaf in own:
            has.setdefault(leaf, stage)
    found = [
        Way(leaf, has[leaf], stage)
        for stage, own in enumerate(after)
        for leaf in own
        if leaf not in before[stage]
    ]
    return sorted(found)


def check_widths(found: Sequence[Way], widths: Sequence[int]) -> None:
    """Refuse to move layers between stages with different numbers of devices.

    Raises:
        UsageError: one would.
    """
    for leaf, source, target in found:
        if widths[source] != widths[target]:
            raise UsageError(
                f"split: layer {max(leaf.layer, 0)} would move from stage {source}, on {widths[source]} "
                f"devices, to stage {target}, on {widths[target]}: between steps layers move between stages "
                f"with equally many; else save, and go on from the checkpoint with the new split"
            )


def move(held: Held, found: Sequence[Way], layout: Layout, exchange: Exchange) -> None:
    """Move leaves, all processes together; a layer at a time, so that little is there twice.

    Args:
        held: what this process has; changed.
        found: where leaves go, in every replica.
        layout: where stages are.
        exchange: sends arrays between stages.

    Raises:
        PeerLost, TrainingError: see `exchange`. Then `held` is of no use any more.
    """
    for layer, own in groupby(found, key=lambda way: way.leaf.layer):
        numbered = list(enumerate(_in_all_replicas(own, layout)))
        sends = {
            (target, number): held[source][leaf]
            for number, (leaf, source, target) in numbered
            if source in held
        }
        expected = [(target, number) for number, (_, _, target) in numbered if target in held]
        come = exchange(f"layer {layer} on its way to another stage", sends, expected)
        if layer >= 0:  # else every stage keeps it
            for leaf, source, _ in {way for _, way in numbered if way.source in held}:
                held[source].pop(leaf, None)
        for number, (leaf, _, target) in numbered:
            if target in held:
                there = come[target, number]
                # What the source keeps may be there as it is, on the same device, and an update donates it.
                held[target][leaf] = there if layer >= 0 else [jnp.copy(shard) for shard in there]


def _in_all_replicas(own: Iterable[Way], layout: Layout) -> Iterator[Way]:
    for leaf, source, target in own:
        for first in range(0, layout.replicas * layout.stages, layout.stages):
            yield Way(leaf, first + source, first + target)
