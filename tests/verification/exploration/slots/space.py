"""Cases of one-sided transfers, messages that nobody may send, and the visit of all states."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rrfp_jax.nixl.memory import ALIGNMENT
from rrfp_jax.nixl.sender import Ask, Dropped, Granted, Refused, Unwanted, Written
from tests.verification.exploration.slots.world import (
    REAL,
    RECEIVER,
    STAGE,
    Case,
    Makers,
    World,
    actions,
    after,
    machine_key,
    message_key,
    start,
)
from tests.verification.exploration.visits import Enough, Move, Reach, never, visit
from tests.verification.exploration.witness import require

SMALL = [
    Case(sends=[[[1, 1, 1]]]),
    Case(sends=[[[1, 2], [1]]]),
    Case(sends=[[[1, 0]], [[2]]]),
    Case(sends=[[[1]], [[1]]], deaths=True),
    Case(sends=[[[1], [1]]], resets=True),
]
"""A second or so each; they have everything that there is."""

LARGE = [
    Case(sends=[[[1, 2, 1, 2]]], slots=3, ahead=2),
    Case(sends=[[[], [1, 1]], [[1], []]]),
    Case(sends=[[[1, 1], []], [[], [1]]], ahead=2),
    Case(sends=[[[1, 1], [1]]], resets=True),
    Case(sends=[[[1]], [[1]]], resets=True),
    Case(sends=[[[1], [1]]], resets=True, deaths=True),
    Case(sends=[[[1]], [[1, 1]]], deaths=True),
    Case(sends=[[[1, 2]], [[2, 1]]]),
    Case(sends=[[[1], [1]], [[1], [1]]]),
    Case(sends=[[[1, 1], [1, 1]]], slots=3, ahead=2, deaths=True),
    Case(sends=[[[2, 1], [1, 2]]], resets=True),
    Case(sends=[[[1, 0, 1]], [[1]], [[1]]], slots=3),
    Case(sends=[[[1, 1]], [[1, 1]]], slots=4, ahead=2, deaths=True),
    Case(sends=[[[1], [1]], [[1], [1]]], resets=True),
]
"""From seconds to minutes; the smallest first."""


NEVER = 99
"""Messages and places never get so far."""


def check_forged(world: World) -> None:
    """Try all of them."""
    for rank in range(1, len(world.ends) + 1):
        if not world.dead and rank not in world.lost:
            for method, message in _to_receiver(world, rank):
                _check(world.machine, method, rank, message)
        for method, message in _to_sender(world, rank):
            _check(world.ends[rank - 1].machine, method, RECEIVER, message)


def _check(pickled: bytes, method: str, rank: int, message: Any) -> None:
    machine = pickle.loads(pickled)
    before = machine_key(machine)
    try:
        getattr(machine, method)(rank, message)
    except Refused as refused:
        require(refused.rank == rank, f"rank {refused.rank} is blamed for {message}")
        require(machine_key(machine) == before, f"{message} is refused, and changes something")
    else:
        require(False, f"{message} is taken")


def _to_receiver(world: World, rank: int) -> Iterator[tuple[str, Any]]:
    empty, small, large = ((((n * ALIGNMENT,), "uint8"),) for n in (0, 1, NEVER))
    key = message_key(NEVER, rank, 0)
    elsewhere = key._replace(stage=STAGE + 1)
    for wrong in (((-1, -ALIGNMENT), "uint8"),), (((1,), "nonsense"),):
        yield "asked", Ask(NEVER, key, wrong, ())
        yield "written", Written(NEVER, key, wrong, 0.0)
    yield "dropped", Dropped(NEVER)
    yield "asked", Ask(NEVER, elsewhere, small, ())
    yield "asked", Ask(NEVER, key, small, (NEVER,))
    yield "asked", Ask(NEVER, key, empty, ())
    yield "asked", Ask(0, key, small, ())
    yield "written", Written(None, elsewhere, empty, 0.0)
    yield "written", Written(None, key, small, 0.0)
    yield "written", Written(NEVER, key, small, 0.0)
    for live in sorted(world.live, key=lambda live: live.place):
        yield "asked", Ask(NEVER, key, small, (live.place, live.place))
        yield "written", Written(live.place, key, large, 0.0)
        yield "written", Written(live.place, key, empty, 0.0)
        if live.rank != rank or live.number is not None or live in world.copies:
            yield "asked", Ask(NEVER, key, small, (live.place,))
            yield "written", Written(live.place, key, small, 0.0)
        if live.rank == rank and live.number is not None:
            yield "asked", Ask(live.number, key, small, ())
    for arrived in sorted(world.arrived, key=str):
        if not world.over:
            yield "written", Written(None, arrived, empty, 0.0)


def _to_sender(world: World, rank: int) -> Iterator[tuple[str, Any]]:
    end = world.ends[rank - 1]
    if end.dead or end.alone:
        return
    for number in (0, len(end.keys) + 1):
        yield "unwanted", Unwanted(number)
        yield "granted", Granted(NEVER, STAGE, number, ALIGNMENT, ((0, 0),))
    for number, slot in sorted(end.writing):
        for live in [each for each in world.live if (each.rank, each.slot) == (rank, slot)]:
            yield "granted", Granted(live.place, STAGE, None, ALIGNMENT, ((slot, 0),))
            yield "granted", Granted(NEVER, STAGE, number, ALIGNMENT, ((slot, 0),))


def explore(
    case: Case,
    makers: Makers = REAL,
    *,
    enough: Enough = never,
    check: Callable[[World], None] = lambda world: None,
) -> Reach:
    """Visit all states of a case, or as many as are enough; from each the end must be within reach."""

    def moves(world: World) -> Iterator[Move]:
        for action in actions(world):
            yield " ".join(map(str, action)).rstrip("_"), partial(after, world, action)

    return visit(start(case, makers), moves, enough, check, World.finished)
