"""Keeping tied parameters equal: gradients go to the owner's stage, its new value comes back.

The other way would be to give every replica the sum of the gradients and to update all of them alike. That
needs the optimizer's state once per replica, and replicas stay equal only as long as programs compiled for
different stages round alike. Here there is one state and one update, and replicas are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax

from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.paths import leaf_paths
from rrfp_jax.runtime.stage import Stage


class Place(NamedTuple):
    """Where a parameter is: stage, chunk, and place in the chunk's list of leaves."""

    stage: int
    chunk: int
    leaf: int


Tie: TypeAlias = tuple[Place, Place]
"""Owner and alias."""


class Exchange(Protocol):
    """`exchange.exchange` of this process."""

    def __call__(
        self, what: str, sends: Mapping[tuple[int, int], jax.Array], expected: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], jax.Array]:
        """Send arrays by receiving stage and number, and wait for the expected ones."""


def locate(params: Params, chunks: Sequence[Sequence[range]], ties: Iterable[tuple[str, str]]) -> list[Tie]:
    """The places of tied parameters, given by path.

    Args:
        params: specs of the whole model, {layer index as text: tree}.
        chunks: by stage, the layers of each of its chunks.
        ties: paths of owner and alias.
    """
    places = {
        path: Place(stage, chunk, leaf)
        for stage, own in enumerate(chunks)
        for chunk, layers in enumerate(own)
        for leaf, path in enumerate(leaf_paths({str(i): params[str(i)] for i in layers}))
    }
    return [(places[owner], places[alias]) for owner, alias in ties]


def collect_gradients(ties: Sequence[Tie], stages: Mapping[int, Stage], exchange: Exchange) -> None:
    """Add the gradient sums of all aliases to their owners', in order of declaration."""
    if not ties:
        return
    found = exchange(
        "gradients of tied parameters",
        {
            (owner.stage, number): stages[alias.stage].gradient(*alias[1:])
            for number, (owner, alias) in enumerate(ties)
            if alias.stage in stages
        },
        [(owner.stage, number) for number, (owner, _) in enumerate(ties) if owner.stage in stages],
    )
    for owner in dict.fromkeys(owner for owner, _ in ties if owner.stage in stages):
        numbers = [number for number, (of, _) in enumerate(ties) if of == owner]
        theirs = [found[owner.stage, number] for number in numbers]
        stages[owner.stage].add_aliases(*owner[1:], theirs)


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
    found = exchange(
        what,
        {
            (alias.stage, number): read(stages[owner.stage], *owner[1:])
            for number, (owner, alias) in enumerate(ties)
            if owner.stage in stages
        },
        [(alias.stage, number) for number, (_, alias) in enumerate(ties) if alias.stage in stages],
    )
    for number, (_, alias) in enumerate(ties):
        if alias.stage in stages:
            write(stages[alias.stage], *alias[1:], found[alias.stage, number])
