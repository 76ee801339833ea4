"""The arrays that updates change, by names that say nothing of where they are, and how they get elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.random_keys import as_key, plain_spec
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.mesh.stage_mesh import Shapes, StageMesh
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.programs.library import Library
from rrfp_jax.runtime.stages.optimizer import Optimizer, OptimizerPart, OptimizerPrograms, WholeOptimizer
from rrfp_jax.runtime.stages.stage import Leaf, Stage
from rrfp_jax.runtime.transport.exchange import Shards

LeafShards: TypeAlias = MutableMapping[Leaf, Shards]
"""What a process's devices have of the leaves of a stage."""

Held: TypeAlias = MutableMapping[int, LeafShards]
"""The same by stage replica of the process (see `Layout`)."""


@dataclass(frozen=True)
class Naming:
    """Which leaves the stages of a split have."""

    params: Params
    chunks: Sequence[Sequence[range]]
    whole: WholeOptimizer | None
    parts: Sequence[OptimizerPart]

    def leaves(self) -> list[list[Leaf]]:
        """By stage. One whose layers have no parameters has no state either."""
        counts = {int(layer): len(jax.tree.leaves(own)) for layer, own in self.params.items()}
        layers = [[i for own in chunks for i in own] for chunks in self.chunks]
        found = [[Leaf(i, False, n) for i in own for n in range(counts[i])] for own in layers]
        for own, part in zip(found, self.parts, strict=False):
            own += [self._of_state(k) for k in part.state if part.params]
        return found

    def held(self, stages: Mapping[int, Stage], optimizers: Iterable[Optimizer]) -> Held:
        """What stages and optimizers have; nothing is copied."""
        found: Held = {
            number: {leaf: stage.stage_mesh.shards([stage.leaf(leaf)]) for leaf in stage.places}
            for number, stage in stages.items()
        }
        for optimizer in optimizers:
            for stage, shards in zip(optimizer.stages, optimizer.shards(), strict=True):
                of_state = zip(map(self._of_state, optimizer.places), shards, strict=True)
                found[stage.index].update(of_state)
        return found

    def state_in(
        self, held: Sequence[LeafShards], programs: OptimizerPrograms, stage_mesh: StageMesh
    ) -> Sequence[jax.Array]:
        """An optimizer's state from what the stages that it updates here have, in their order."""
        leaves = map(self._of_state, programs.places)
        shards = [shard for leaf in leaves for own in held for shard in own[leaf]]
        arrays = stage_mesh.joined(shards, [plain_spec(spec) for spec in programs.state])
        return [as_key(spec, array) for spec, array in zip(programs.state, arrays, strict=True)]

    def _of_state(self, k: int) -> Leaf:
        assert self.whole is not None
        return Leaf(self.whole.layer_of(k), True, k)


def params_in(own: LeafShards, specs: Params, stage_mesh: StageMesh) -> Params:
    """Parameters of some layers, like these specs (with shardings), from what a stage has."""
    found = {}
    for layer, of_layer in specs.items():
        leaves, structure = jax.tree.flatten(of_layer)
        shards = [shard for n in range(len(leaves)) for shard in own[Leaf(int(layer), False, n)]]
        found[layer] = jax.tree.unflatten(structure, stage_mesh.joined(shards, leaves))
    return found


class LeafTransfer(NamedTuple):
    """A leaf, or its gradient, that goes from one stage to another, or from one stage replica.

    Attributes:
        leaf: what it is at the source.
        into: what it is at the target.
        resized: whether the stages have different numbers of devices, see `WidthChanges`.
    """

    leaf: Leaf
    source: int
    target: int
    into: Leaf
    resized: bool = False

    @property
    def back(self) -> LeafTransfer:
        """The way back."""
        return LeafTransfer(self.into, self.target, self.source, self.leaf, self.resized)

    def in_all_replicas(self, layout: Layout) -> list[LeafTransfer]:
        """Between stages, as between the stage replicas of each replica."""
        first = range(0, layout.replicas * layout.stages, layout.stages)
        return [self._replace(source=n + self.source, target=n + self.target) for n in first]


class Exchange(Protocol):
    """`exchange.exchange` of this process."""

    def __call__(
        self, what: str, sends: Mapping[tuple[int, int], Shards], expected: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], Shards]:
        """Send arrays by receiving stage and number, and wait for the expected ones."""


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
    expected = [(way.target, n) for n, way in apart if way.target in here]
    come = exchange(what, sends, expected) if apart else {}
    return {n: shards for (_, n), shards in come.items()}


# Layers that move to other stages.


def transfers(before: Sequence[Collection[Leaf]], after: Sequence[Collection[Leaf]]) -> list[LeafTransfer]:
    """What each stage lacks of what it will have, from the first stage that has it; layer by layer."""
    has: dict[Leaf, int] = {}
    for stage, own in enumerate(before):
        for leaf in own:
            has.setdefault(leaf, stage)
    return sorted(
        LeafTransfer(leaf, has[leaf], stage, leaf)
        for stage, own in enumerate(after)
        for leaf in own
        if leaf not in before[stage]
    )


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
    """Move leaves, all processes together; a layer at a time, so that little is there twice.

    Raises:
        PeerLost, TrainingError: see `exchange`. Then `held` is of no use any more.
    """
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
    """The ways from the owners of tied parameters to their aliases, in every replica of the stages.

    Raises:
        UsageError: one that is spread is tied to a stage with another number of devices.
    """
    spread, widths, ties = library.spread, layout.widths, library.roles.ties
    at = {i: stage for stage, own in enumerate(chunks) for layers in own for i in layers}
    leaves = {
        path: Leaf(int(layer), False, n)
        for layer, own in library.params.items()
        for n, path in enumerate(leaf_paths({layer: own}))
    }
    found = []
    for paths in ties:
        leaf, into = (leaves[path] for path in paths)
        source, target = at[leaf.layer], at[into.layer]
        resized = widths[source] != widths[target]
        if resized and not spread.isdisjoint(paths):
            raise UsageError(
                f"{paths[0]} is tied between stages of {widths[source]} and {widths[target]} devices, "
                f"over which sharding= spreads it: keep it whole, PartitionSpec(), or give both as many"
            )
        found.append(LeafTransfer(leaf, source, target, into, resized).in_all_replicas(layout))
    return [way for replica in zip(*found, strict=True) for way in replica]


def distant_pairs(ties: Iterable[LeafTransfer]) -> set[tuple[int, int]]:
    """Of those between two stages, the stages."""
    return {(tie.source, tie.target) for tie in ties if tie.source != tie.target}


def arrivals(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage]) -> dict[int, set[Shapes]]:
    """By stage of this process, the messages to it in which values and gradients come."""
    found: dict[int, set[Shapes]] = {stage: set() for stage in stages}
    values, gradients = [(tie, Stage.leaf) for tie in ties], [(tie.back, Stage.gradient) for tie in ties]
    reads = values + gradients + [(tie, Stage.gradient) for tie in ties]  # the last for whoever asks for them
    for way, read in reads:
        if way.source != way.target and way.target in stages:
            stage = stages[way.target]
            like = read(stage, way.into)
            found[way.target].add(stage.stage_mesh.shapes_sent([like], way.resized))
    return found


def collect_gradients(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Add the gradient sums of all aliases to their owners', in order of declaration."""
    ways = [tie.back for tie in ties]
    found = _passed("gradients of tied parameters", ways, stages, exchange, Stage.gradient)
    for owner in dict.fromkeys((way.target, way.into) for way in ways if way.target in stages):
        theirs = [found[n] for n, way in enumerate(ways) if (way.target, way.into) == owner]
        stages[owner[0]].add_aliases(owner[1], theirs)


def spread_values(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Give every alias its owner's value."""
    found = _passed("values of tied parameters", ties, stages, exchange, Stage.leaf)
    for number, value in found.items():
        stages[ties[number].target].set_leaf(ties[number].into, value)


def spread_gradients(ties: Sequence[LeafTransfer], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Give every alias its owner's gradient sum."""
    found = _passed("sums of tied gradients", ties, stages, exchange, Stage.gradient)
    for number, value in found.items():
        stages[ties[number].target].set_gradient(ties[number].into, value)


def _passed(
    what: str,
    ways: Sequence[LeafTransfer],
    stages: Mapping[int, Stage],
    exchange: Exchange,
    read: Callable[[Stage, Leaf], jax.Array],
) -> dict[int, jax.Array]:
    """What this process's stages get, as it lies at the target, by number; within a stage nothing is sent."""

    def shards(way: LeafTransfer) -> Shards:
        stage_mesh, value = stages[way.source].stage_mesh, [read(stages[way.source], way.leaf)]
        return stage_mesh.copies(value) if way.resized else stage_mesh.shards(value)

    come, found = _sent(what, ways, stages, shards, exchange), {}
    for number, way in enumerate(ways):
        if way.target in stages:
            stage = stages[way.target]
            if number not in come:
                found[number] = read(stage, way.leaf)
            elif way.resized:
                (found[number],) = stage.stage_mesh.copied(come[number])
            else:
                (found[number],) = stage.stage_mesh.joined(come[number], [read(stage, way.into)])
    return found
