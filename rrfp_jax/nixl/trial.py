"""Whether NIXL works between every two neighbours, tried at the start: all processes together."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.nixl.agent import Agent, MemoryRange, NixlAbsent, WriteFailed
from rrfp_jax.nixl.memory import memory_of, zeros
from rrfp_jax.runtime.run.world import START_SECONDS, World
from rrfp_jax.runtime.transport.protocol import Devices, Unusable

SMALL, LARGE = 2**12, 2**22
"""Bytes that are written: to see how long one takes, and at what rate."""

TIMES = 5
"""Each is written so often, and the shortest time counts."""

WRITE_SECONDS = 10.0
"""Limit for one write."""

MOST_TOLD = 8
"""Edges; of more, only the slowest is told."""


class MeasuredEdge(NamedTuple):
    """What was found between two neighbours."""

    source: int
    target: int
    seconds: float  # that a small write takes
    rate: float  # of a large one, in bytes per second

    def __str__(self) -> str:
        return f"rank {self.source} to {self.target}: {1e6 * self.seconds:.0f} us, {self.rate / 1e9:.1f} GB/s"


def speeds(edges: Sequence[MeasuredEdge]) -> str:
    """What was measured, for the user."""
    if len(edges) <= MOST_TOLD:
        return "; ".join(map(str, edges))
    return f"{len(edges)} edges, the slowest {min(edges, key=lambda edge: edge.rate)}"


def meet(world: World, devices: Devices, neighbours: Collection[int]) -> tuple[Agent, list[MeasuredEdge]]:
    """Make an agent, and try it with each neighbour, both ways; `Unusable` is raised alike everywhere."""
    device = next(iter(devices.values()))[0]
    mine: dict[str, Any] = {"error": ""}
    try:
        agent = Agent(device.platform != "cpu", _all_here(world))
        mine["metadata"] = agent.metadata  # without the memory of this trial
        source = jax.device_put(_pattern(world.rank), device)
        targets = {rank: zeros(LARGE, device) for rank in sorted(neighbours)}
        here, *memory = map(memory_of, (source, *targets.values()))
        agent.register([here, *memory])
        mine["memory"] = agent.describe(memory)
        mine["places"] = [(rank, *place) for rank, place in zip(targets, memory, strict=True)]
    except NixlAbsent as absent:
        mine["error"] = str(absent)
    except WriteFailed as error:
        mine["error"] = f"NIXL cannot register memory: {error}"
    told = world.gather("NIXL's agents", mine, START_SECONDS)
    for rank, one in enumerate(told):
        if one["error"]:
            raise Unusable(f"{world.describe(rank)}: {one['error']}")
    agent.peers = {rank: one["metadata"] for rank, one in enumerate(told) if rank != world.rank}
    results = [(rank, *_tried(agent, here, rank, told[rank], world.rank)) for rank in targets]
    found = world.gather("a trial of NIXL", results, START_SECONDS)
    spoilt = [r for r, array in targets.items() if not np.array_equal(np.asarray(array), _pattern(r))]
    wrong = world.gather("what came of NIXL's trial", spoilt, START_SECONDS)
    agent.forget_peers()
    agent.release([here, *memory])
    world.gather("the end of NIXL's trial", None, START_SECONDS)
    for rank, own in enumerate(found):
        for target, reason, _, _ in own:
            if reason or rank in wrong[target]:
                said = reason or "it says that it wrote, and what lies there is something else"
                raise Unusable(f"{world.describe(rank)} cannot write to {world.describe(target)}: {said}")
    return agent, [MeasuredEdge(rank, to, *times) for rank, own in enumerate(found) for to, _, *times in own]


def _tried(
    agent: Agent, here: MemoryRange, rank: int, told: Mapping[str, Any], own_rank: int
) -> tuple[str, float, float]:
    """Write to a neighbour: the error if there is one, seconds of a small write, bytes per second."""
    (there,) = [MemoryRange(*place) for to, *place in told["places"] if to == own_rank]
    try:
        agent.know(rank, told["memory"])
        ends = [([here._replace(size=size)], [there._replace(size=size)]) for size in (SMALL, LARGE)]
        tries = [[agent.write_within(WRITE_SECONDS, rank, *each) for _ in range(TIMES)] for each in ends]
        small, large = map(min, tries)
    except WriteFailed as error:
        return str(error), 0.0, 0.0
    return "", small, LARGE / large


def _all_here(world: World) -> bool:
    """Whether the control messages of all others come by this machine's loopback."""
    assert world.mailbox is not None
    ours = [connection.socket for connection in world.mailbox.connections.values()]
    return all(own.family == socket.AF_UNIX or ip_address(own.getsockname()[0]).is_loopback for own in ours)


def _pattern(rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What a rank writes."""
    return (np.arange(LARGE, dtype=np.uint32) * (2 * rank + 1) >> 3).astype(np.uint8)
