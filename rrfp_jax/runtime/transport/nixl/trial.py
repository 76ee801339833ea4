"""Whether NIXL works between every two neighbours, tried at the start: all processes together."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from time import perf_counter, sleep
from typing import Any

import jax
import numpy as np

from rrfp_jax.runtime.run.waits import pause
from rrfp_jax.runtime.run.world import START_SECONDS, World
from rrfp_jax.runtime.transport.nixl.agent import Absent, Agent, Memory, Peers, Stretch, WriteFailed
from rrfp_jax.runtime.transport.nixl.receiver import memory_of, zeros
from rrfp_jax.runtime.transport.protocol import Devices

SMALL, LARGE = 2**12, 2**22
"""Bytes that are written: to see how long one takes, and at what rate."""

TIMES = 5
"""Each is written so often, and the shortest time counts."""

WRITE_SECONDS = 10.0
"""Limit for one write."""


@dataclass(frozen=True)
class Edge:
    """What was found between two neighbours.

    Attributes:
        source, target: their ranks.
        seconds: that a small write takes.
        rate: of a large one, in bytes per second.
    """

    source: int
    target: int
    seconds: float
    rate: float

    def __str__(self) -> str:
        return f"rank {self.source} to {self.target}: {1e6 * self.seconds:.0f} us, {self.rate / 1e9:.1f} GB/s"


@dataclass(frozen=True)
class Meeting:
    """What NIXL's transport is made of, once it has worked.

    Attributes:
        edges: of all neighbours of the run.
    """

    agent: Agent
    peers: Peers
    edges: Sequence[Edge]


def meet(world: World, devices: Devices, neighbours: Collection[int]) -> Meeting | str:
    """Make an agent, and try it with each neighbour, both ways.

    Args:
        world: the run.
        devices: of this process's stages.
        neighbours: ranks with which this process exchanges messages.

    Returns:
        What was made, or why it cannot be used: equal in all processes.
    """
    mine = _Mine(world, devices, neighbours)
    told = world.gather("NIXL's agents", mine.told(), START_SECONDS)
    if reasons := [
        f"{world.describe(rank)}: {one['error']}" for rank, one in enumerate(told) if one["error"]
    ]:
        return reasons[0]
    assert mine.agent is not None
    peers = Peers(mine.agent, {rank: one["metadata"] for rank, one in enumerate(told) if rank != world.rank})
    found = world.gather("a trial of NIXL", mine.write_to(peers, told), START_SECONDS)
    wrong = world.gather("what came of NIXL's trial", mine.wrong(), START_SECONDS)
    peers.forget()
    mine.let_go()
    world.gather("the end of NIXL's trial", None, START_SECONDS)
    for rank, results in enumerate(found):
        for target, error, _, _ in results:
            if error or rank in wrong[target]:
                said = error or "it says that it wrote, and what lies there is something else"
                return f"{world.describe(rank)} cannot write to {world.describe(target)}: {said}"
    return Meeting(
        mine.agent, peers, [Edge(s, t, *times) for s, own in enumerate(found) for t, _, *times in own]
    )


class _Mine:
    """This process's part of a trial."""

    def __init__(self, world: World, devices: Devices, neighbours: Collection[int]) -> None:
        self._world, self._neighbours = world, sorted(neighbours)
        device = next(iter(devices.values()))[0]
        self.agent: Agent | None = None
        self._error = ""
        try:
            self.agent = Agent(device.platform != "cpu", _all_here(world))
        except Absent as absent:
            self._error = str(absent)
            return
        self._metadata = self.agent.metadata  # without the memory of this trial
        self._source = jax.device_put(_pattern(world.rank), device).block_until_ready()
        self._targets = {rank: zeros(LARGE, device) for rank in self._neighbours}
        self._memory = [memory_of(array) for array in (self._source, *self._targets.values())]
        try:
            self.agent.register(self._memory)
        except WriteFailed as error:
            self.agent, self._error = None, f"NIXL cannot register memory: {error}"

    def told(self) -> dict[str, Any]:
        """What the others must know."""
        if self.agent is None:
            return {"error": self._error}
        places = dict(zip(self._neighbours, self._memory[1:], strict=True))
        return {
            "error": "",
            "metadata": self._metadata,
            "memory": self.agent.describe(self._memory[1:]),
            "places": [(rank, *memory) for rank, memory in places.items()],
        }

    def write_to(
        self, peers: Peers, told: Sequence[Mapping[str, Any]]
    ) -> list[tuple[int, str, float, float]]:
        """To each neighbour: rank, error if there is one, seconds of a small write, bytes per second."""
        found = []
        for rank in self._neighbours:
            (there,) = [Memory(*place) for to, *place in told[rank]["places"] if to == self._world.rank]
            try:
                peers.know(rank, told[rank]["memory"])
                small, large = (self._seconds(peers.name(rank), there, size) for size in (SMALL, LARGE))
                found.append((rank, "", small, LARGE / large))
            except WriteFailed as error:
                found.append((rank, str(error), 0.0, 0.0))
        return found

    def _seconds(self, peer: str, there: Memory, size: int) -> float:
        return min(self._written(peer, there, size) for _ in range(TIMES))

    def _written(self, peer: str, there: Memory, size: int) -> float:
        assert self.agent is not None
        here, began = self._memory[0], perf_counter()
        writing = self.agent.write(peer, [Stretch(here._replace(size=size), there._replace(size=size))])
        while not writing.has_ended():
            waited = perf_counter() - began
            if waited > WRITE_SECONDS:
                raise WriteFailed(f"{size} bytes were not written in {WRITE_SECONDS:.0f} s")
            sleep(pause(waited))
        return perf_counter() - began

    def wrong(self) -> list[int]:
        """The neighbours whose bytes have not come."""
        return [
            rank
            for rank, array in self._targets.items()
            if not np.array_equal(np.asarray(array), _pattern(rank))
        ]

    def let_go(self) -> None:
        """What was only for the trial."""
        assert self.agent is not None
        self.agent.release(self._memory)


def _all_here(world: World) -> bool:
    """Whether the control messages of all others come by this machine's loopback."""
    assert world.mailbox is not None
    sockets = [connection.socket for connection in world.mailbox.connections.values()]
    return all(
        own.family == socket.AF_UNIX or ip_address(own.getsockname()[0]).is_loopback for own in sockets
    )


def _pattern(rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What a rank writes."""
    return (np.arange(LARGE, dtype=np.uint32) * (2 * rank + 1) >> 3).astype(np.uint8)
