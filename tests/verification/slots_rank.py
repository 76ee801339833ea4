"""What each of two ranks does whose memory `slots.py` looks at."""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

import jax
import numpy as np

from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.nixl.receiver import SLOTS
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.choice import between_processes
from rrfp_jax.runtime.transport.protocol import Endpoints, Key
from tests.support import toy
from tests.support.no_mail import by_transport
from tests.verification.memory import resident_bytes

MIB = 2**20
MESSAGE = 205 * MIB
"""So that all slots have 1 GiB, and as much is in flight."""
WARM_UP = 10
"""The first of so many steps fill pools and caches."""


def resident() -> int:
    """Bytes of this process's memory."""
    gc.collect()
    return resident_bytes()


def in_flight(world: World) -> dict[str, Any]:
    """Slots of 1 GiB on each rank, and messages of as much that rank 1 has got and holds."""
    devices = {world.rank: jax.local_devices()[:1]}
    began = resident()
    ends = Endpoints(world, [[0], [1]], devices, [1 - world.rank])
    another = between_processes("nixl", ends)
    another.transport.reserve({})
    library, began = resident() - began, resident()
    transport = between_processes("nixl", ends).transport
    said = transport.reserve({world.rank: [(((MESSAGE,), "uint8"),)]})[world.rank]
    grown, round = resident() - began, world.next_round()
    transport.begin(round)
    world.gather("a round", None)
    held: list[jax.Array] = []
    before = resident()
    values = jax.block_until_ready(jax.device_put(np.ones(MESSAGE, np.uint8))) if world.rank == 0 else None
    for n in range(SLOTS):
        if values is not None:
            transport.offer(Key(round, 1, Task(FORWARD, 0, n).input), [values])
            transport.produced(Key(round, 1, Task(FORWARD, 0, n).input), perf_counter())
        while world.rank == 1 and len(held) <= n:
            held += [arrival.arrays[0] for arrival in transport.poll()]
            assert world.mailbox is not None
            world.mailbox.sleep(0.05)
        transport.poll()
    jax.block_until_ready(held)
    world.gather("all to have come", None)
    while world.rank == 0 and transport.poll():
        pass
    mine = MESSAGE if values is not None else MESSAGE * len(held)
    found = {"slots": said, "grown_by_slots": grown, "in_flight": mine, "grown": resident() - before}
    world.gather("all to have looked", None)
    transport.close()
    another.transport.close()
    return found | {"library": library}


def soak(steps: int) -> dict[str, Any]:
    """A training by NIXL: growth after the first tenth."""
    model: Any = toy  # which has no types
    by_transport()
    trainer = model.trainer(2, transport="nixl", data=lambda step: model.microbatches(8, seed=step % 7))
    start = arrays = 0
    for report in trainer.steps(steps):
        if report.step == steps // WARM_UP:
            start, arrays = resident(), len(jax.live_arrays())
    return {"steps": steps, "grown": resident() - start, "arrays": len(jax.live_arrays()) - arrays}


def memory_of_ranks(steps: int) -> dict[str, Any]:
    """Both, on both ranks: what each found."""
    world = join()
    found = world.gather("memory in flight", in_flight(world))
    return {"in_flight": found, "soak": world.gather("memory of a soak", soak(steps))}
