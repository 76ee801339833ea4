"""Keeping tied parameters equal: gradients go to the owner's stage, its new value comes back.

The other way would be to give every replica the sum of the gradients and to update all of them alike. That
needs the optimizer's state once per replica, and replicas stay equal only as long as programs compiled for
different stages round alike. Here there is one state and one update, and replicas are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax

from rrfp_jax.runtime.exchange import Shards
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.paths import leaf_paths
from rrfp_jax.runtime.stage import Stage


class Place(NamedTuple):
    """Where a parameter is: stage (its seat), chunk, and place in the chunk's list of leaves."""

    stage: int
    chunk: int
    leaf: int


Tie: TypeAlias = tuple[Place, Place]
"""Owner and alias."""


class Exchange(Protocol):
    """`exchange.exchange` of this process."""

    def __call__(
        self, what: str, sends: Mapping[tuple[int, int], Shards], expected: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], Shards]:
        """Send arrays by receiving stage and number, and wait for the expected ones."""


def locate(
    params: Params, chunks: Sequence[Sequence[range]], ties: Iterable[tuple[str, str]], replicas: int = 1
) -> list[Tie]:
    """The places of tied parameters, given by path.

    Args:
        params: specs of the whole model, {layer index as text: tree}.
        chunks: by stage, the layers of each of its chunks.
        ties: paths of owner and alias.
        replicas: of all stages; each has its own.
    """
    places = {
        path: Place(stage, chunk, leaf)
        for stage, own in enumerate(chunks)
        for chunk, layers in enumerate(own)
        for leaf, path in enumerate(leaf_paths({str(i): params[str(i)] for i in layers}))
    }
    pairs = [(places[owner], places[alias]) for owner, alias in ties]
    seats = range(0, replicas * len(chunks), len(chunks))
    return [
        (owner._replace(stage=first + owner.stage), alias._replace(stage=first + alias.stage))
        for first in seats
        for owner, alias in pairs
    ]


def collect_gradients(ties: Sequence[Tie], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Add the gradient sums of all aliases to their owners', in order of declaration."""
    if not ties:
        return
    ways = [(alias, owner) for owner, alias in ties]
    found = _passed("gradients of tied parameters", ways, stages, exchange, Stage.gradient)
    for owner in dict.fromkeys(owner for owner, _ in ties if owner.stage in stages):
        numbers = [number for number, (of, _) in enumerate(ties) if of == owner]
        stage = stages[owner.stage]
        own = stage.gradient(*owner[1:])
        theirs = [stage.site.joined(found[owner.stage, number], [own])[0] for number in numbers]
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
    if not ties:
        return
    found = _passed(what, ties, stages, exchange, read)
    for number, (_, alias) in enumerate(ties):
        if alias.stage in stages:
            stage = stages[alias.stage]
            old = read(stage, *alias[1:])
            (value,) = stage.site.joined(found[alias.stage, number], [old])
            write(stage, *alias[1:], value)


def _passed(
    what: str,
    ways: Sequence[tuple[Place, Place]],
    stages: Mapping[int, Stage],
    exchange: Exchange,
    read: Callable[[Stage, int, int], jax.Array],
) -> Mapping[tuple[int, int], Shards]:
    """What this process's stages get by ways from place to place: shards by stage and number of the way.

    Within a stage nothing is sent.
    """
    sends: dict[tuple[int, int], Shards] = {}
    here: dict[tuple[int, int], Shards] = {}
    expected = []
    for number, (source, target) in enumerate(ways):
        key, inside = (target.stage, number), source.stage == target.stage
        if source.stage in stages:
            stage = stages[source.stage]
            (here if inside else sends)[key] = stage.site.shards([read(stage, *source[1:])])
        if target.stage in stages and not inside:
            expected.append(key)
    if all(source.stage == target.stage for source, target in ways):
        return here
    return {**here, **exchange(what, sends, expected)}
