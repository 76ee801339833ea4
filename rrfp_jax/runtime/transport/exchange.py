"""Sends single arrays between stages outside a step's tasks, by the same transports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import TypeAlias

import jax

from rrfp_jax.core.tasks import Direction, Input
from rrfp_jax.runtime.run.mailbox import EventWakeup
from rrfp_jax.runtime.run.signals import interrupts_held
from rrfp_jax.runtime.run.waits import LONGEST_SLEEP_SECONDS, ForTransfer, LimitedWait
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.protocol import Key, Transport, soonest_poll

Shards: TypeAlias = Sequence[jax.Array]
"""What this process's devices have of an array; see `StageMesh.shards`."""

Place: TypeAlias = tuple[int, int]
"""A receiving stage replica (see `Layout`), and a number that tells the arrays sent to it apart."""


def exchange(
    what: str,
    sends: Mapping[Place, Shards],
    expected: Collection[Place],
    *,
    world: World,
    transports: Sequence[Transport],
    carrier: Callable[[int], Transport],
    name: Callable[[int], str],
    stall_seconds: float,
) -> dict[Place, Shards]:
    """Send arrays to stages and wait until all have arrived; all processes call this together.

    Args:
        what: is exchanged, for messages.
        sends: the shards of each array.
        expected: what comes to stages of this process.
        world: the processes of the run.
        transports: all that may be used.
        carrier: the one of them that carries messages to a stage.
        name: of a stage, for messages.
        stall_seconds: limit on waiting without anything arriving.

    Raises:
        PeerLost: a process of the run is gone.
        TrainingError: a transfer failed, or nothing came for so long.
    """
    round = world.next_round()
    arrived: dict[Place, Shards] = {}

    def missing() -> list[Place]:
        return [place for place in expected if place not in arrived]

    def awaits() -> Sequence[ForTransfer]:
        return [ForTransfer(what=what, stages=tuple(map(name, sorted({stage for stage, _ in missing()}))))]

    broken = True
    allowed = jax.transfer_guard_device_to_device("allow")  # as in `Driver.run`
    with allowed, world.waits_for(awaits, stall_seconds) as wait, interrupts_held() as interrupted:
        try:
            for transport in transports:
                transport.begin(round)
            keys = {place: Key(round, place[0], Input(Direction.WEIGHT, 0, place[1])) for place in sends}
            for place, shards in sends.items():
                carrier(place[0]).offer(keys[place], shards)
            for place, shards in sends.items():
                world.await_ready(f"{what} to be computed", shards, stall_seconds)
                carrier(place[0]).produced(keys[place], perf_counter())
            while missing():
                if interrupted():
                    raise KeyboardInterrupt
                if arrivals := [one for transport in transports for one in transport.poll()]:
                    arrived |= {(key.stage, key.input.microbatch): shards for key, shards, *_ in arrivals}
                    wait.progressed()
                if missing():
                    wait.check()
                    _sleep(wait, world, soonest_poll(transports))
            broken = False
        finally:
            for transport in transports:
                transport.finish(broken=broken)
    # A process that went on at once could end, and with it what others are still pulling from it.
    world.gather(f"{what} to have arrived", None, stall_seconds)
    return arrived


def _sleep(wait: LimitedWait, world: World, seconds: float | None) -> None:
    bell = world.mailbox or EventWakeup()
    bell.sleep(wait.shortened(LONGEST_SLEEP_SECONDS if seconds is None else seconds))
