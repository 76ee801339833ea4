"""The arrays that updates change, by names that say nothing of where they are, and how they get elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, MutableMapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.stage_mesh import Shapes, StageMesh
from rrfp_jax.runtime.mesh.topology import Layout
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.programs.library import Library
from rrfp_jax.runtime.stages.stage import Leaf, Stage, leaves_in
from rrfp_jax.runtime.transport.protocol import Place, Shards

LeafShards: TypeAlias = MutableMapping[Leaf, Shards]
"""What a process's devices have of the leaves of a stage."""

Held: TypeAlias = MutableMapping[int, LeafShards]
"""`LeafShards` by stage replica of the process (see `Layout`)."""

Exchange: TypeAlias = Callable[[str, Mapping[Place, Shards], Sequence[Place]], Mapping[Place, Shards]]
"""`Driver.exchange` of this process: what is exchanged, what it sends, what it expects -> what has come."""


def params_in(own: LeafShards, specs: Params, stage_mesh: StageMesh) -> Params:
    """Parameters of some layers, like these specs (with shardings), from what a stage has."""
    found = {}
    for layer, of_layer in specs.items():
        leaves, structure = jax.tree.flatten(of_layer)
        shards = [shard for n in range(len(leaves)) for shard in own[Leaf(int(layer), False, n)]]
        found[layer] = jax.tree.unflatten(structure, stage_mesh.joined(shards, leaves))
    return found


class LeafTransfer(NamedTuple):
    """A leaf, or its gradient, that goes from one stage to another, or from one stage replica."""

    leaf: Leaf  # what it is at the source
    source: int
    target: int
    into: Leaf  # what it is at the target
    resized: bool = False  # whether the stages have different numbers of devices, see `WidthChanges`

    @property
    def back(self) -> LeafTransfer:
        return LeafTransfer(self.into, self.target, self.source, self.leaf, self.resized)

    def in_all_replicas(self, layout: Layout) -> list[LeafTransfer]:
        """Between stages, as between the stage replicas of each replica."""
        first = range(0, layout.replicas * layout.stages, layout.stages)
        return [self._replace(source=n + self.source, target=n + self.target) for n in first]


def _sent(
    what: str,
    ways: Sequence[LeafTransfer],
    here: Container[int],
    read: Callable[[LeafTransfer], Shards],
    exchange: Exchange,
) -> dict[int, Shards]:
    """What comes to this process's stages from others, by number of the transfer; all together."""
    apart = [(n, way) for n, way in enumerate(ways) if way.source != way.target]
    sends = {(way.target, n): read(way) for n, way in apart if way.source in here}
    come = exchange(what, sends, [(way.target, n) for n, way in apart if way.target in here]) if apart else {}
    return {n: shards for (_, n), shards in come.items()}


# Layers that move to other stages.


def transfers(before: Sequence[Collection[Leaf]], after: Sequence[Collection[Leaf]]) -> list[LeafTransfer]:
    """What each stage lacks of what it will have, from the first stage that has it; layer by layer."""
    has = {leaf: stage for stage, own in reversed([*enumerate(before)]) for leaf in own}
    lacking = [(stage, leaf) for stage, own in enumerate(after) for leaf in own if leaf not in before[stage]]
    return sorted(LeafTransfer(leaf, has[leaf], stage, leaf) for stage, leaf in lacking)


def check_widths(found: Sequence[LeafTransfer], widths: Sequence[int]) -> None:
    """Refuse to move layers between stages with different numbers of devices."""
    for leaf, source, target, *_ in found:
        if widths[source] != widths[target]:
            raise UsageError(
                f"split: layer {max(leaf.layer, 0)} would move from stage {source}, on {widths[source]} "
                f"devices, to stage {target}, on {widths[target]}: between steps layers move between stages "
                f"with equally many; else save, and go on from the checkpoint with the new split"
            )


def move(held: Held, found: Sequence[LeafTransfer], layout: Layout, exchange: Exchange) -> None:
    """Move leaves, all processes together, layer by layer; if that fails, `held` is of no use any more."""
    for layer, own in groupby(found, key=lambda way: way.leaf.layer):
        ways = [way for between in own for way in between.in_all_replicas(layout)]
        what = f"layer {layer} on its way to another stage"
        come = _sent(what, ways, held, lambda way: held[way.source][way.leaf], exchange)
        if layer >= 0:  # else every stage keeps it
            for leaf, source in {(way.leaf, way.source) for way in ways if way.source in held}:
                held[source].pop(leaf, None)
        for number, there in come.items():
            # What the source keeps may be there as it is, on the same device, and an update donates it.
            way = ways[number]
            held[way.target][way.into] = there if layer >= 0 else [jnp.copy(shard) for shard in there]


# Tied parameters.


def locate(library: Library, chunks: Sequence[Sequence[range]], layout: Layout) -> list[LeafTransfer]:
    """The ways from the owners of tied parameters to their aliases, in every replica of the stages."""
    spread, widths = library.spread, layout.widths
    at = {i: stage for stage, own in enumerate(chunks) for layers in own for i in layers}
    leaves = dict(zip(leaf_paths(library.params), leaves_in(library.params), strict=True))
    found = []
    for paths in library.roles.ties:
        leaf, into = (leaves[path] for path in paths)
        source, target = at[leaf.layer], at[into.layer]
        if (resized := widths[source] != widths[target]) and not spread.isdisjoint(paths):
            raise UsageError(
                f"{paths[0]} is tied between stages of {widths[source]} and {widths[target]} devices, "
                f"over which sharding= spreads it: keep it whole, PartitionSpec(), or give both as many"
            )
        found.append(LeafTransfer(leaf, source, target, into, resized).in_all_replicas(layout))
    return [way for replica in zip(*found, strict=True) for way in replica]


def arrivals(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage]) -> dict[int, set[Shapes]]:
    """By stage of this process, the messages to it in which values and gradients come."""
    found: dict[int, set[Shapes]] = {stage: set() for stage in stages}
    for tie in ties:
        # The last are for whoever asks for gradients.
        for way, read in ((tie, Stage.leaf), (tie.back, Stage.gradient), (tie, Stage.gradient)):
            if way.source != way.target and way.target in stages:
                stage = stages[way.target]
                found[way.target].add(stage.stage_mesh.shapes_sent([read(stage, way.into)], way.resized))
    return found


def collect_gradients(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Add the gradient sums of all aliases to their owners', in order of declaration."""
    ways = [tie.back for tie in ties]
    theirs: dict[tuple[int, Leaf], list[jax.Array]] = {}
    for way, value in _passed("gradients of tied parameters", ways, stages, exchange, Stage.gradient):
        theirs.setdefault((way.target, way.into), []).append(value)
    for (stage, leaf), gradients in theirs.items():
        stages[stage].add_aliases(leaf, gradients)


def spread_values(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Give every alias its owner's value."""
    for way, value in _passed("values of tied parameters", ties, stages, exchange, Stage.leaf):
        stages[way.target].set_leaf(way.into, value)


def spread_gradients(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Give every alias its owner's gradient sum."""
    for way, value in _passed("sums of tied gradients", ties, stages, exchange, Stage.gradient):
        stages[way.target].set_gradient(way.into, value)


def _passed(
    what: str,
    ways: Sequence[LeafTransfer],
    stages: Mapping[int, Stage],
    exchange: Exchange,
    read: Callable[[Stage, Leaf], jax.Array],
) -> list[tuple[LeafTransfer, jax.Array]]:
    """What this process's stages get, as it lies at the target; within a stage nothing is sent."""

    def shards(way: LeafTransfer) -> Shards:
        stage_mesh, value = stages[way.source].stage_mesh, [read(stages[way.source], way.leaf)]
        return stage_mesh.copies(value) if way.resized else stage_mesh.shards(value)

    come, found = _sent(what, ways, stages, shards, exchange), []
    for number, way in enumerate(ways):
        if way.target in stages:
            stage = stages[way.target]
            if number not in come:
                value = read(stage, way.leaf)
            elif way.resized:
                (value,) = stage.stage_mesh.copied(come[number])
            else:
                (value,) = stage.stage_mesh.joined(come[number], [read(stage, way.into)])
            found.append((way, value))
    return found
