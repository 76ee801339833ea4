"""Sends single arrays between stages outside a step's tasks, by the same transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import TypeAlias

import jax

from rrfp_jax.core.tasks import Direction, Input
from rrfp_jax.runtime.run.interrupts import interrupts_held
from rrfp_jax.runtime.run.mailbox import EventWakeup
from rrfp_jax.runtime.run.waits import LONGEST_SLEEP_SECONDS, ForTransfer, LimitedWait
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.protocol import Arrival, Devices, Key, Transport

Shards: TypeAlias = Sequence[jax.Array]
"""What this process's devices have of an array; see `StageMesh.shards`."""


def exchange(
    what: str,
    sends: Mapping[tuple[int, int], Shards],
    expected: Collection[tuple[int, int]],
    *,
    world: World,
    transport: Transport,
    devices: Devices,
    name: Callable[[int], str],
    stall_seconds: float,
) -> dict[tuple[int, int], Shards]:
    """Send arrays to stages and wait until all have arrived; all processes call this together.

    Args:
        what: is exchanged, for messages.
        sends: by receiving stage (its stage replica, see `Layout`) and a number that tells messages to it
            apart: an array's shards.
        expected: stages of this process and numbers of what they get.
        world, transport, devices: of this process.
        name: of a stage, for messages.
        stall_seconds: limit on waiting without anything arriving.

    Raises:
        PeerLost: a process of the run is gone.
        TrainingError: a transfer failed, or nothing came for so long.
    """
    round = world.next_round()
    pending = _Pending(expected)

    def awaits() -> Sequence[ForTransfer]:
        stages = tuple(map(name, sorted({stage for stage, _ in pending.missing()})))
        return [ForTransfer(what=what, stages=stages)]

    allowed = jax.transfer_guard_device_to_device("allow")  # as in `Driver.run`
    with allowed, world.waits_for(awaits, stall_seconds) as wait, interrupts_held() as interrupted:
        try:
            transport.begin(round, devices)
            keys = {place: Key(round, place[0], Input(Direction.WEIGHT, 0, place[1])) for place in sends}
            for place, shards in sends.items():
                transport.offer(keys[place], shards)
            for place, shards in sends.items():
                world.await_ready(f"{what} to be computed", shards, stall_seconds)
                transport.produced(keys[place], perf_counter())
            while pending.missing():
                if interrupted():
                    raise KeyboardInterrupt
                if arrivals := transport.poll():
                    pending.add(arrivals)
                    wait.progressed()
                if pending.missing():
                    wait.check()
                    _sleep(wait, world, transport)
        except BaseException:
            transport.reset()
            raise
    # A process that went on at once could end, and with it what others are still pulling from it.
    world.gather(f"{what} to have arrived", None, stall_seconds)
    return pending.arrived


class _Pending:
    """What has arrived of an exchange, and what has not."""

    def __init__(self, expected: Collection[tuple[int, int]]) -> None:
        self._expected = expected
        self.arrived: dict[tuple[int, int], Shards] = {}

    def add(self, arrivals: Sequence[Arrival]) -> None:
        """File what has come."""
        for (_, stage, task), shards, _, _ in arrivals:
            self.arrived[stage, task.microbatch] = shards

    def missing(self) -> list[tuple[int, int]]:
        """Stages and numbers of what has not come."""
        return [place for place in self._expected if place not in self.arrived]


def _sleep(wait: LimitedWait, world: World, transport: Transport) -> None:
    """Until something may have come."""
    patience = transport.patience()
    bell = world.mailbox or EventWakeup()
    bell.sleep(wait.shortened(LONGEST_SLEEP_SECONDS if patience is None else patience))
