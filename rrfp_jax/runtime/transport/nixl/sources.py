"""The memory that messages are written from: it stays registered for a while after.

The arrays of every step lie where those of the step before lay, and to register memory costs more than to
write a small message from it. What is registered stays where it is as long as this lasts: in the pool of a
GPU, which JAX keeps; in host memory, if nothing is pinned, because writes stay on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rrfp_jax.runtime.transport.nixl.agent import LOOPBACK, NETWORKS, Agent, Memory

MOST = 64
"""Stretches that stay registered, of those which nothing is written from."""

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
KEEPS_ITS_MEMORY = ("", "default", "bfc")


class Sources:
    """What messages are written from.

    Args:
        agent: of this process.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        own_pool = os.environ.get(ALLOCATOR, "") in KEEPS_ITS_MEMORY
        nothing_is_pinned = agent.here and os.environ.get(NETWORKS) == LOOPBACK
        self._keeps = own_pool if agent.on_devices else nothing_is_pinned
        self._idle: dict[Memory, None] = {}  # registered, the oldest first

    def take(self, memory: Sequence[Memory]) -> None:
        """Something is going to be written from here.

        Raises:
            WriteFailed: the memory cannot be registered.
        """
        memory = list(dict.fromkeys(memory))
        new = [each for each in memory if each not in self._idle]
        for each in new:
            self._let_go([old for old in self._idle if _overlap(old, each)])  # it is not there any more
        if new:
            self._agent.register(new)
        for each in memory:
            self._idle.pop(each, None)

    def leave(self, memory: Sequence[Memory]) -> None:
        """It has been written, once for each `take`."""
        memory = list(dict.fromkeys(memory))
        again = [each for each in memory if not self._keeps or each in self._idle]
        if again:
            self._agent.release(again)
        if self._keeps:
            self._idle.update(dict.fromkeys(memory))
            self._let_go(list(self._idle)[: max(len(self._idle) - MOST, 0)])

    def _let_go(self, idle: Sequence[Memory]) -> None:
        if idle:
            self._agent.release(idle)
        for each in idle:
            del self._idle[each]


def _overlap(one: Memory, other: Memory) -> bool:
    apart = one.address + one.size <= other.address or other.address + other.size <= one.address
    return one.device == other.device and not apart
