"""What messages cost, as measured by `scale.measure`, and what a simulation takes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MessageCosts:
    """Seconds.

    Attributes:
        store_ways: from a driver that posts a message to the one that gets it, by the store; some of them.
        socket_ways: the same by socket.
        set: for which a writing call keeps a processor of the store.
        get: the same of a reading one.
        servers: processors of the store; where they are shared, of all processes.
        shared: whether all processes and the store have the same processors; else each has enough of its own.
        driver: what a driver works per task.
        post: for which a message by socket keeps its sender.
        take: the same of its receiver.
    """

    store_ways: Sequence[float]
    socket_ways: Sequence[float]
    set: float
    get: float
    servers: int = 1
    shared: bool = False
    driver: float
    post: float
    take: float

    @classmethod
    def of(cls, measured: Any, driver: float, shared: bool) -> MessageCosts:
        """From what `scale.measure` writes.

        Where processors are shared, as while it was measured, a call takes them the client's part, too; else
        the store has one.
        """
        kept = {}
        for kind in ("set", "get"):
            call = measured["calls"][kind]["16"]
            kept[kind] = 1e-6 * (call["server_cpu_us"] + (call["client_cpu_us"] if shared else 0.0))
        return cls(
            store_ways=measured["ways"]["kv"],
            socket_ways=measured["ways"]["socket"],
            **kept,
            servers=measured["cores"] if shared else 1,
            shared=shared,
            driver=driver,
            **measured["host"],
        )

    @property
    def calls_per_second(self) -> float:
        """The most that the store can serve, as many writing as reading."""
        return self.servers * 2 / (self.set + self.get)
