"""Messages that nobody may send, tried in every state: each is refused and changes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from rrfp_jax.runtime.transport.nixl.messages import Dropped, Granted, Offer, Refused, Unwanted, Written
from rrfp_jax.runtime.transport.nixl.packing import ALIGNMENT
from tests.verification.exploration.slots.world import RECEIVER, STAGE, World, message_key
from tests.verification.exploration.witness import require

NEVER = 99
"""Messages and places never get so far."""


def check_forged(world: World) -> None:
    """Try all of them.

    Raises:
        Broken: one is taken, or changes something.
    """
    for rank in range(1, len(world.ends) + 1):
        if not world.dead and rank not in world.lost:
            for method, message in _to_receiver(world, rank):
                _check(world.machine, method, rank, message)
        for method, message in _to_sender(world, rank):
            _check(world.ends[rank - 1].machine, method, RECEIVER, message)


def _check(pickled: bytes, method: str, rank: int, message: Any) -> None:
    machine = pickle.loads(pickled)
    before = machine.key()
    try:
        getattr(machine, method)(rank, message)
    except Refused as refused:
        require(refused.rank == rank, f"rank {refused.rank} is blamed for {message}")
        require(machine.key() == before, f"{message} is refused, and changes something")
    else:
        require(False, f"{message} is taken")


def _to_receiver(world: World, rank: int) -> Iterator[tuple[str, Any]]:
    end = world.ends[rank - 1]
    heard = len(end.keys) - sum(isinstance(said, Offer) for said in end.outbox)
    yield "written", Written(NEVER, 0.0)
    yield "dropped", Dropped(NEVER)
    small, large = ((((n * ALIGNMENT,), "uint8"),) for n in (1, NEVER))
    key = message_key(NEVER, rank, 0)
    if heard:
        yield "offered", Offer(heard, key, small, None, ())
    yield "offered", Offer(NEVER, key._replace(stage=STAGE + 1), small, None, ())
    yield "offered", Offer(NEVER, key, small, NEVER, ())
    for live in sorted(world.live, key=lambda live: live.place):
        if live.rank != rank or live.number is not None:
            yield "offered", Offer(NEVER, key, small, live.place, ())
            yield "offered", Offer(NEVER, key, small, None, (live.place,))
        elif not any(isinstance(said, Offer) and live.place in said.returned for said in end.outbox):
            yield "offered", Offer(NEVER, key, large, live.place, ())
            yield "offered", Offer(NEVER, key, small, live.place, (live.place,))
    told = {live.number for live in world.live if live.rank == rank}
    for number in range(1, heard + 1):
        round, _, sent = end.keys[number - 1]
        if number not in told and world.case.sends[rank - 1][round - 1][sent.microbatch]:
            yield "written", Written(number, 0.0)
    copied = {copy.number for copy in world.copies if copy.rank == rank}
    for number in sorted(number for number in copied if number is not None):
        yield "written", Written(number, 0.0)
        yield "dropped", Dropped(number)


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
