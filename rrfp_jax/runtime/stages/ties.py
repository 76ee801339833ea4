"""Keeps tied parameters equal: gradients go to the owner's stage, its new value comes back.

The other way would be to give every alias the sum of the gradients and to update all of them alike. That
needs the optimizer's state once per alias, and aliases stay equal only while programs compiled for different
stages round alike. Here there is one state and one update, and aliases are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.programs.library import Library
from rrfp_jax.runtime.programs.stage_mesh import Shapes
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.runtime.transport.exchange import Shards


class Place(NamedTuple):
    """Where a parameter is: stage (its stage replica), chunk, and place in the chunk's list of leaves."""

    stage: int
    chunk: int
    leaf: int


class Tie(NamedTuple):
    """From where to where a value goes: from the owner of a parameter to an alias.

    Attributes:
        resized: whether their stages have different numbers of devices, see `Ends`.
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
