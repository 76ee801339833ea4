"""Writes from arrays, as they lie, into slots of other processes: what is under way, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import jax

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.nixl.agent import LOOPBACK, NETWORKS, Agent, MemoryRange, Peers, Stretch, WriteFailed, Writing
from rrfp_jax.nixl.memory import memory_of, packed
from rrfp_jax.nixl.sender import Write
from rrfp_jax.runtime.run.waits import pause
from rrfp_jax.runtime.transport.protocol import Key

LOOK_SECONDS = 5e-5
"""A write is looked at for so long before a thread watches it: about what it costs to wake that thread."""

MOST_IDLE = 64
"""Stretches that stay registered, of those from which nothing is being written."""

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
KEEPS_ITS_MEMORY = ("", "default", "bfc")


class Sources:
    """Memory that messages are written from; it stays registered for a while, for the next messages."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        own_pool = ENVIRONMENT.get(ALLOCATOR, "") in KEEPS_ITS_MEMORY
        nothing_is_pinned = agent.here and ENVIRONMENT.get(NETWORKS) == LOOPBACK
        self._keeps = own_pool if agent.on_devices else nothing_is_pinned
        self._idle: dict[MemoryRange, None] = {}  # registered, the oldest first

    def take(self, memory: Sequence[MemoryRange]) -> None:
        """Something is going to be written from here; `WriteFailed` if it cannot be registered."""
        memory = list(dict.fromkeys(memory))
        new = [each for each in memory if each not in self._idle]
        for each in new:
            self._let_go([old for old in self._idle if _overlap(old, each)])  # it is not there any more
        if new:
            self._agent.register(new)
        for each in memory:
            self._idle.pop(each, None)

    def leave(self, memory: Sequence[MemoryRange]) -> None:
        """It has been written, once for each `take`."""
        memory = list(dict.fromkeys(memory))
        again = [each for each in memory if not self._keeps or each in self._idle]
        if again:
            self._agent.release(again)
        if self._keeps:
            self._idle.update(dict.fromkeys(memory))
            self._let_go(list(self._idle)[: max(len(self._idle) - MOST_IDLE, 0)])

    def _let_go(self, idle: Sequence[MemoryRange]) -> None:
        if idle:
            self._agent.release(idle)
        for each in idle:
            del self._idle[each]


def _overlap(one: MemoryRange, other: MemoryRange) -> bool:
    apart = one.address + one.size <= other.address or other.address + other.size <= one.address
    return one.device == other.device and not apart


class _UnderWay(NamedTuple):
    rank: int
    key: Key
    arrays: Sequence[jax.Array]  # which must stay
    memory: Sequence[MemoryRange]  # theirs, registered


class FailedWrite(Exception):
    """A write has failed; to whom, of what, and why."""

    def __init__(self, rank: int, key: Key, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.key = rank, key


class Writes:
    """Writes arrays from where they lie, which costs less here than to pack them first.

    `tell` is called with a message's number by the watching thread, when its write has ended.
    """

    def __init__(self, agent: Agent, peers: Peers, tell: Callable[[int], None]) -> None:
        self._agent, self._peers, self._sources = agent, peers, Sources(agent)
        self._under_way: dict[int, _UnderWay] = {}
        self._watch = _Watch(tell)

    def begin(self, write: Write, key: Key, arrays: Sequence[jax.Array]) -> bool:
        """Begin to write a message; whether that has ended already, and `end` can be called.

        Raises:
            FailedWrite: its receiver cannot be reached.
        """
        at, stretches = write.place.at, []
        for (device, offset, size), array in zip(packed(write.specs, len(at)).parts, arrays, strict=True):
            if size:
                address, number = at[device]
                stretches.append(Stretch(memory_of(array), MemoryRange(address + offset, size, number)))
        memory = [stretch.here for stretch in stretches]
        try:
            self._sources.take(memory)
            try:
                writing = self._agent.write(self._peers.name(write.rank), stretches)
                ended = _ends_soon(writing)
            except WriteFailed:
                self._sources.leave(memory)
                raise
        except WriteFailed as error:
            raise FailedWrite(write.rank, key, str(error)) from None
        self._under_way[write.number] = _UnderWay(write.rank, key, arrays, memory)
        if not ended:
            self._watch.add(write.number, writing)
        return ended

    def end(self, number: int) -> int:
        """Note that a write has ended, whose arrays may go; to whom it was.

        Raises:
            FailedWrite: it has failed.
        """
        own = self._under_way.pop(number)
        self._sources.leave(own.memory)
        if error := self._watch.failed.pop(number, None):
            raise FailedWrite(own.rank, own.key, error)
        return own.rank

    @property
    def ranks(self) -> set[int]:
        """To whom any is under way."""
        return {own.rank for own in self._under_way.values()}

    def close(self) -> None:
        """Nothing more will be written; what is under way is watched to its end."""
        self._watch.close()


def _ends_soon(writing: Writing) -> bool:
    until = perf_counter() + LOOK_SECONDS
    while not (ended := writing.has_ended()) and perf_counter() < until:
        pass
    return ended


class _Watch:
    """A thread that looks at writes until they have ended; there is none before the first."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._new: list[tuple[int, Writing]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failed: dict[int, str] = {}  # why, by number, from before it is told

    def add(self, number: int, writing: Writing) -> None:
        """Look at this write, too."""
        with self._changed:
            self._new.append((number, writing))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rrfp-writes", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        watched: list[tuple[int, Writing]] = []
        since = perf_counter()
        while True:
            with self._changed:
                while not (watched or self._new or self._closed):
                    self._changed.wait()
                if self._closed and not (watched or self._new):
                    return
                if self._new:
                    watched, self._new, since = watched + self._new, [], perf_counter()
            ended = {number for number, writing in watched if self._has_ended(number, writing)}
            watched = [own for own in watched if own[0] not in ended]
            for number in sorted(ended):
                self._tell(number)
            with self._changed:
                if not (ended or self._new):  # a new one may be short
                    self._changed.wait(pause(perf_counter() - since))

    def _has_ended(self, number: int, writing: Writing) -> bool:
        try:
            return writing.has_ended()
        except WriteFailed as error:
            self.failed[number] = str(error)
            return True
