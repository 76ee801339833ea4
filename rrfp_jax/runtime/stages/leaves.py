"""The arrays that updates change, by names that say nothing of where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
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
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.runtime.transport.exchange import Shards


class Leaf(NamedTuple):
    """Names an array that an update changes.

    Attributes:
        layer: that it belongs to; -1 for what belongs to none, which every stage has.
        of_state: whether it is of the optimizer's state, and not a parameter.
        number: among the layer's parameters, or in the state of the whole model.
    """

    layer: int
    of_state: bool
    number: int


Own: TypeAlias = MutableMapping[Leaf, Shards]
"""What a process's devices have of the leaves of a stage."""

Held: TypeAlias = MutableMapping[int, Own]
"""The same by stage replica of the process (see `Layout`)."""


@dataclass(frozen=True)
class Naming:
    """Which leaves the stages of a split have.

    Attributes:
        params: specs of all parameters, {layer index as text: nested dict}.
        chunks: by stage, the layers of each of its chunks.
        whole, parts: the optimizer, and the part of each stage; None and nothing without one.
    """

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
        found: Held = {}
        for number, stage in stages.items():
            found[number] = {
                Leaf(int(layer), False, n): stage.stage_mesh.shards([leaf])
                for layer, own in stage.params.items()
                for n, leaf in enumerate(jax.tree.leaves(own))
            }
        for optimizer in optimizers:
            for stage, shards in zip(optimizer.stages, optimizer.shards(), strict=True):
                of_state = zip(map(self._of_state, optimizer.places), shards, strict=True)
                found[stage.index].update(of_state)
        return found

    def state_in(
        self, held: Sequence[Own], programs: OptimizerPrograms, stage_mesh: StageMesh
    ) -> Sequence[jax.Array]:
        """An optimizer's state from what the stages that it updates here have, in their order."""
        leaves = map(self._of_state, programs.places)
        shards = [shard for leaf in leaves for own in held for shard in own[leaf]]
        arrays = stage_mesh.joined(shards, [plain_spec(spec) for spec in programs.state])
        return [as_key(spec, array) for spec, array in zip(programs.state, arrays, strict=True)]

    def _of_state(self, k: int) -> Leaf:
        assert self.whole is not None
        return Leaf(self.whole.layer_of(k), True, k)


def params_in(own: Own, specs: Params, stage_mesh: StageMesh) -> Params:
    """Parameters of some layers, like these specs (with shardings), from what a stage has."""
    found = {}
    for layer, of_layer in specs.items():
        leaves, structure = jax.tree.flatten(of_layer)
        shards = [shard for n in range(len(leaves)) for shard in own[Leaf(int(layer), False, n)]]
        found[layer] = jax.tree.unflatten(structure, stage_mesh.joined(shards, leaves))
    return found


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


class Place(NamedTuple):
    """Where a parameter is: stage (its stage replica), chunk, and place in the chunk's list of leaves."""

    stage: int
    chunk: int
    leaf: int


class Tie(NamedTuple):
    """From where to where a value goes: from the owner of a parameter to an alias.

    Attributes:
        resized: whether their stages have different numbers of devices, see `WidthChanges`.
    """

    source: Place
    target: Place
    resized: bool

    @property
    def back(self) -> Tie:
        """From the alias to the owner."""
        return Tie(self.target, self.source, self.resized)


class Exchange(Protocol):
    """`exchange.exchange` of this process."""

    def __call__(
        self, what: str, sends: Mapping[tuple[int, int], Shards], expected: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], Shards]:
        """Send arrays by receiving stage and number, and wait for the expected ones."""


def locate(library: Library, chunks: Sequence[Sequence[range]], layout: Layout) -> list[Tie]:
    """The places of tied parameters; every replica of the stages has its own.

    Args:
        library: knows the parameters, how they lie, and which are tied.
        chunks: by stage, the layers of each of its chunks.
        layout: where the stages are.

    Raises:
        UsageError: one that is spread is tied to a stage with another number of devices.
    """
    params, spread, widths = library.params, library.spread, layout.widths
    places = {
        path: Place(stage, chunk, leaf)
        for stage, own in enumerate(chunks)
        for chunk, layers in enumerate(own)
        for leaf, path in enumerate(leaf_paths({str(i): params[str(i)] for i in layers}))
    }
    pairs = [(places[owner], places[alias]) for owner, alias in library.roles.ties]
    for paths, (owner, alias) in zip(library.roles.ties, pairs, strict=True):
        one, other = widths[owner.stage], widths[alias.stage]
        if one != other and not spread.isdisjoint(paths):
            raise UsageError(
                f"{paths[0]} is tied between stages of {one} and {other} devices, "
                f"over which sharding= spreads it: keep it whole, PartitionSpec(), or give both as many"
            )
    stage_replicas = range(0, layout.replicas * len(chunks), len(chunks))
    return [
        Tie(
            owner._replace(stage=first + owner.stage),
            alias._replace(stage=first + alias.stage),
            widths[owner.stage] != widths[alias.stage],
        )
        for first in stage_replicas
        for owner, alias in pairs
    ]


def distant_pairs(ties: Iterable[Tie]) -> set[tuple[int, int]]:
    """Of those between two stages, the stages."""
    return {(source.stage, target.stage) for source, target, _ in ties if source.stage != target.stage}


def arrivals(ties: Sequence[Tie], stages: Mapping[int, Stage]) -> dict[int, set[Shapes]]:
    """By stage of this process, the messages to it in which values and gradients come."""
    found: dict[int, set[Shapes]] = {stage: set() for stage in stages}
    values, gradients = [(tie, Stage.leaf) for tie in ties], [(tie.back, Stage.gradient) for tie in ties]
    reads = values + gradients + [(tie, Stage.gradient) for tie in ties]  # the last for whoever asks for them
    for (source, target, resized), read in reads:
        if source.stage != target.stage and target.stage in stages:
            stage = stages[target.stage]
            like = read(stage, *target[1:])
            found[target.stage].add(stage.stage_mesh.shapes_sent([like], resized))
    return found


def collect_gradients(ties: Sequence[Tie], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Add the gradient sums of all aliases to their owners', in order of declaration."""
    if not ties:
        return
    ways = [tie.back for tie in ties]
    found = _passed("gradients of tied parameters", ways, stages, exchange, Stage.gradient)
    for owner in dict.fromkeys(way.target for way in ways if way.target.stage in stages):
        stage = stages[owner.stage]
        theirs = [found[n] for n, way in enumerate(ways) if way.target == owner]
        stage.add_aliases(*owner[1:], theirs)


def spread_values(ties: Sequence[Tie], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Give every alias its owner's value."""
    _spread("values of tied parameters", ties, stages, exchange, Stage.leaf, Stage.set_leaf)


def spread_gradients(ties: Sequence[Tie], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Give every alias its owner's gradient sum."""
    _spread("sums of tied gradients", ties, stages, exchange, Stage.gradient, Stage.set_gradient)


def _spread(
    what: str,
    ties: Sequence[Tie],
    stages: Mapping[int, Stage],
    exchange: Exchange,
    read: Callable[[Stage, int, int], jax.Array],
    write: Callable[[Stage, int, int, jax.Array], None],
) -> None:
    if ties:
        found = _passed(what, ties, stages, exchange, read)
        for number, value in found.items():
            alias = ties[number].target
            write(stages[alias.stage], *alias[1:], value)


def _passed(
    what: str,
    ways: Sequence[Tie],
    stages: Mapping[int, Stage],
    exchange: Exchange,
    read: Callable[[Stage, int, int], jax.Array],
) -> dict[int, jax.Array]:
    """What this process's stages get, as it lies at the target, by number of the way.

    Within a stage nothing is sent.
    """
    apart = {n: way for n, way in enumerate(ways) if way.source.stage != way.target.stage}
    sends: dict[tuple[int, int], Shards] = {}
    for number, (source, target, resized) in apart.items():
        if source.stage in stages:
            stage_mesh, value = stages[source.stage].stage_mesh, [read(stages[source.stage], *source[1:])]
            sends[target.stage, number] = stage_mesh.copies(value) if resized else stage_mesh.shards(value)
    expected = [(way.target.stage, n) for n, way in apart.items() if way.target.stage in stages]
    come = exchange(what, sends, expected) if apart else {}
    found = {}
    for number, (source, target, resized) in enumerate(ways):
        if target.stage in stages:
            stage = stages[target.stage]
            if number not in apart:
                found[number] = read(stage, *source[1:])
            elif resized:
                (found[number],) = stage.stage_mesh.copied(come[target.stage, number])
            else:
                like = read(stage, *target[1:])
                (found[number],) = stage.stage_mesh.joined(come[target.stage, number], [like])
    return found
