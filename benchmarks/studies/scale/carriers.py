"""The carriers of a group's messages in virtual time, from what messages cost where they were measured.

By socket, posting and taking a message keep the driver, and the way between is drawn from the measured ones.

By the store it is as in runtime/run/consensus.py. A process writes a batch at a time, of all that has
collected; for each partner it asks for one batch at a time, and the answer comes when that is there. All
calls of all groups queue up at one server, in the order in which they reach it: writing keeps it for `set`,
reading for half of `get` when it is asked, and for half when it answers, which it does at once. The rest of
a message's way, for threads to wake and bytes to travel, is drawn from the measured ones: half of the least
rest is before the server, all else behind it. Left out are deletions, one call in 64 that write, and that
the threads of a process take turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from random import Random
from typing import Any, Protocol, TypeAlias

from benchmarks.studies.scale.costs import MessageCosts
from rrfp_jax.core.group import GroupMessage, recipients
from rrfp_jax.sim.engine import EventQueue

Deliver: TypeAlias = Callable[[float, int, tuple[float, GroupMessage]], None]
"""Called with the time, the number of the process, and a message with the time at which it was posted."""


class Processors:
    """Serve one request each, in the order in which they come.

    Attributes:
        kept: for how long in all (s).
    """

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count  # since or from when each is, a heap
        self.kept = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When a request that comes now will have been served."""
        end = max(now, self._free[0]) + seconds
        heapreplace(self._free, end)
        self.kept += seconds
        return end


class VirtualCarrier(Protocol):
    """Carries messages within groups of equal size; processes are numbered group by group.

    Attributes:
        calls: of the store so far.
    """

    calls: int

    def post(self, now: float, sender: int, message: GroupMessage) -> None:
        """Tell it to whom it is for."""


@dataclass
class _Carrier:
    """What both are made of.

    Attributes:
        size: processes of a group.
        seed: of the ways that are drawn.
    """

    agenda: EventQueue[int]
    size: int
    costs: MessageCosts
    processors: Processors
    seed: int
    deliver: Deliver

    def __post_init__(self) -> None:
        self.random = Random(self.seed)


class Socket(_Carrier):
    """See above."""

    calls = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._free: defaultdict[int, float] = defaultdict(float)  # when a process's driver is
        self._latest: defaultdict[tuple[int, int], float] = defaultdict(float)  # arrival from one at another

    def post(self, now: float, sender: int, message: GroupMessage) -> None:
        """See `VirtualCarrier.post`."""
        first = sender - sender % self.size
        for member in recipients(message, self.size):
            left = self._free[sender] = max(now, self._free[sender]) + self.costs.post
            pair = sender, first + member
            # A connection keeps the order.
            at = max(left + self.random.choice(self.costs.socket_ways), self._latest[pair])
            self._latest[pair] = at
            self.agenda.add(at, self._come, first + member, (now, message))

    def _come(self, now: float, to: int, sent: tuple[float, GroupMessage]) -> None:
        self._free[to] = max(now, self._free[to]) + self.costs.take
        self.agenda.add(self._free[to], self.deliver, to, sent)


class Store(_Carrier):
    """See above."""

    def __post_init__(self) -> None:
        super().__post_init__()
        served = self.costs.set + self.costs.get / 2
        rests = [max(way - served, 0.0) for way in self.costs.store_ways]
        self._there = min(rests) / 2  # seconds from a process to the server
        self._backs = [rest - self._there for rest in rests]
        self._outbox: defaultdict[int, list[tuple[float, GroupMessage]]] = defaultdict(list)
        self._writing: set[int] = set()
        self._written: defaultdict[int, list[Any]] = defaultdict(list)  # batches, by sender
        self._readers: dict[tuple[int, int], _Reader] = {}  # by sender and receiver
        self._waiting: defaultdict[int, list[_Reader]] = defaultdict(list)  # by sender: asked for its next
        self.calls = 0

    def post(self, now: float, sender: int, message: GroupMessage) -> None:
        """See `VirtualCarrier.post`."""
        first = sender - sender % self.size
        for member in recipients(message, self.size):
            if (sender, first + member) not in self._readers:  # it has asked from the beginning
                reader = self._readers[sender, first + member] = _Reader(sender, first + member)
                self._waiting[sender].append(reader)
                self.calls += 1
        self._outbox[sender].append((now, message))
        if sender not in self._writing:
            self._write(now, sender)

    def _write(self, now: float, sender: int) -> None:
        self._writing.add(sender)
        self.calls += 1
        self.agenda.add(now + self._there, self._reached, sender, self._outbox.pop(sender))

    def _reached(self, now: float, sender: int, batch: Any) -> None:
        self.agenda.add(self.processors.serve(now, self.costs.set), self._stored, sender, batch)

    def _stored(self, now: float, sender: int, batch: Any) -> None:
        self._written[sender].append(batch)
        self.agenda.add(now + self._back(), self._written_so, sender, None)
        self._answer(now, self._waiting.pop(sender, ()))

    def _written_so(self, now: float, sender: int, what: None) -> None:
        self._writing.discard(sender)
        if sender in self._outbox:
            self._write(now, sender)

    def _asked(self, now: float, to: int, reader: _Reader) -> None:
        self.agenda.add(self.processors.serve(now, self.costs.get / 2), self._looked, to, reader)

    def _looked(self, now: float, to: int, reader: _Reader) -> None:
        if len(self._written[reader.sender]) > reader.heard:
            self._answer(now, [reader])
        else:
            self._waiting[reader.sender].append(reader)

    def _answer(self, now: float, readers: Sequence[_Reader]) -> None:
        """One after another, before whatever has come in the meantime."""
        for number, reader in enumerate(readers, 1):
            self.processors.serve(now, self.costs.get / 2)  # whoever comes later is later by that
            at = now + number * self.costs.get / 2 + self._back()
            self.agenda.add(at, self._come, reader.to, reader)

    def _come(self, now: float, to: int, reader: _Reader) -> None:
        batch = self._written[reader.sender][reader.heard]
        reader.heard += 1
        self.calls += 1
        self.agenda.add(now + self._there, self._asked, to, reader)
        for sent in batch:
            self.deliver(now, to, sent)

    def _back(self) -> float:
        return self.random.choice(self._backs)


class _Reader:
    """A thread that reads what one process writes, for another."""

    __slots__ = ("heard", "sender", "to")

    def __init__(self, sender: int, to: int) -> None:
        self.sender, self.to, self.heard = sender, to, 0
