"""Sending single arrays between stages outside a step's tasks, by the same transport."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from time import perf_counter

import jax

from rrfp_jax.core.tasks import WEIGHT, Task
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.bell import EventBell
from rrfp_jax.runtime.interrupts import interrupts_held
from rrfp_jax.runtime.transport import Key, Transport
from rrfp_jax.runtime.world import LONGEST_SLEEP_SECONDS, World


def exchange(
    what: str,
    sends: Mapping[tuple[int, int], jax.Array],
    expected: Collection[tuple[int, int]],
    *,
    world: World,
    transport: Transport,
    devices: Mapping[int, jax.Device],
    stall_seconds: float,
) -> dict[tuple[int, int], jax.Array]:
    """Send arrays to stages and wait until all have arrived; all processes call this together.

    Args:
        what: is exchanged, for messages.
        sends: by receiving stage and a number that tells messages to it apart.
        expected: stages of this process and numbers of what they get.
        world, transport, devices: of this process.
        stall_seconds: limit on waiting without anything arriving.

    Raises:
        PeerLost: a process of the run is gone.
        TrainingError: a transfer failed, or nothing came for so long.
    """
    round = world.next_round()
    arrived: dict[tuple[int, int], jax.Array] = {}
    progress = perf_counter()

    def waiting() -> list[str]:
        stages = sorted({stage for stage, number in expected if (stage, number) not in arrived})
        to = ", ".join(f"stage {stage}" for stage in stages)
        return [f"{what} to {to}, since {perf_counter() - progress:.1f} s"]

    bell = world.mailbox or EventBell()
    world.waiting = waiting
    with interrupts_held() as interrupted:
        try:
            transport.begin(round, devices)
            for (stage, number), array in sends.items():
                key = Key(round, stage, Task(WEIGHT, 0, number))
                transport.offer(key, [array])
                array.block_until_ready()
                transport.produced(key, perf_counter())
            while len(arrived) < len(expected):
                if interrupted():
                    raise KeyboardInterrupt
                for (_, stage, task), (array,), _ in transport.poll():
                    arrived[stage, task.microbatch] = array
                    progress = perf_counter()
                if len(arrived) < len(expected):
                    left = progress + stall_seconds - perf_counter()
                    if left <= 0:
                        me = world.describe(world.rank)
                        raise TrainingError(f"{me} gives up waiting for {waiting()[0]}")
                    patience = transport.patience()
                    bell.sleep(min(LONGEST_SLEEP_SECONDS if patience is None else patience, left))
        except BaseException:
            transport.reset()
            raise
    world.waiting = tuple
    # A process that went on at once could end, and with it what others are still pulling from it.
    world.gather(f"{what} to have arrived", None, stall_seconds)
    return arrived
