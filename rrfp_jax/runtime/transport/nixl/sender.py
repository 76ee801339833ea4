"""The sender's end: it asks for places, and writes where it may. Theory of operation: `messages.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple, TypeAlias

import jax

from rrfp_jax.runtime.run.waits import pause
from rrfp_jax.runtime.transport.nixl.agent import Agent, Memory, Peers, Stretch, WriteFailed, Writing
from rrfp_jax.runtime.transport.nixl.copies import Sources, packed
from rrfp_jax.runtime.transport.nixl.messages import Ask, Dropped, Granted, Refused, Unwanted, Written
from rrfp_jax.runtime.transport.nixl.receiver import stretches_of
from rrfp_jax.runtime.transport.protocol import Key, Specs

LOOK_SECONDS = 5e-5
"""A write is looked at for so long before a thread watches it: about what it costs to wake that thread."""


@dataclass(frozen=True)
class _UnderWay:
    rank: int
    key: Key
    arrays: Sequence[jax.Array]  # which must stay
    memory: Sequence[Memory]  # theirs, registered


class Failed(Exception):
    """A write has failed; to whom, of what, and why."""

    def __init__(self, rank: int, key: Key, reason: str) -> None:
        super().__init__(reason)
        self.rank, self.key = rank, key


class Writes:
    """Writes arrays from where they lie, which costs less here than to pack them first.

    Args:
        agent: of this process.
        peers: the others' agents.
        tell: called with a message's number by the watching thread, when its write has ended.
    """

    def __init__(self, agent: Agent, peers: Peers, tell: Callable[[int], None]) -> None:
        self._agent, self._peers, self._sources = agent, peers, Sources(agent)
        self._under_way: dict[int, _UnderWay] = {}
        self._watch = _Watch(tell)

    def begin(self, write: Write, key: Key, arrays: Sequence[jax.Array]) -> bool:
        """Begin to write a message; whether that has ended already, and `end` can be called.

        Raises:
            Failed: its receiver cannot be reached.
        """
        at, lie = write.place.at, stretches_of(write.specs, arrays, len(write.place.at))
        memory = [here for _, here in lie]
        stretches = [
            Stretch(here, Memory(at[part.device][0] + part.offset, part.size, at[part.device][1]))
            for part, here in lie
        ]
        try:
            self._sources.take(memory)
        except WriteFailed as error:
            raise Failed(write.rank, key, str(error)) from None
        try:
            writing = self._agent.write(self._peers.name(write.rank), stretches)
            ended = _ends_soon(writing)
        except WriteFailed as error:
            self._sources.leave(memory)
            raise Failed(write.rank, key, str(error)) from None
        self._under_way[write.number] = _UnderWay(write.rank, key, arrays, memory)
        if not ended:
            self._watch.add(write.number, writing)
        return ended

    def end(self, number: int) -> int:
        """Note that a write has ended, whose arrays may go; to whom it was.

        Raises:
            Failed: it has failed.
        """
        own = self._under_way.pop(number)
        self._sources.leave(own.memory)
        if error := self._watch.failed.pop(number, None):
            raise Failed(own.rank, own.key, error)
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


class Say(NamedTuple):
    """Send a message to a rank."""

    rank: int
    message: Ask | Written | Dropped


class Write(NamedTuple):
    """Write a message to its place, and tell `complete` when all of it is there."""

    number: int
    rank: int
    specs: Specs
    place: Granted


class Delivered(NamedTuple):
    """A message is where it belongs, and its arrays are needed no more."""

    number: int


class Forget(NamedTuple):
    """A message will not be written; its arrays are needed no more."""

    number: int


Instruction: TypeAlias = Say | Write | Delivered | Forget


@dataclass
class _Outgoing:
    rank: int
    key: Key
    specs: Specs
    asked: bool
    place: Granted | None = None
    state: Literal["offered", "produced", "writing"] = "offered"
    ended: float = 0.0


class Sender:
    """One process's end. Each event gives the instructions that follow from it, in order."""

    def __init__(self) -> None:
        self._latest = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._ahead: dict[tuple[int, int], list[Granted]] = {}  # by rank and stage
        self._lost: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether every message has ended."""
        return not self._outgoing

    def offer(self, rank: int, key: Key, specs: Specs) -> tuple[int, list[Instruction]]:
        """Offer a message to a rank: take the smallest place ahead that holds it, or ask for one.

        Returns:
            Its number, by which `produced` and all instructions name it.
        """
        self._latest += 1
        outgoing = self._outgoing[self._latest] = _Outgoing(rank, key, specs, asked=False)
        if not packed(specs, 1).size:  # there is nothing to write
            return self._latest, []
        ahead = self._ahead.get((rank, key.stage), [])
        if fitting := [place for place in ahead if packed(specs, len(place.at)).size <= place.room]:
            outgoing.place = min(fitting, key=lambda place: (place.room, place.place))
            ahead.remove(outgoing.place)
            return self._latest, []
        outgoing.asked, returned = True, tuple(place.place for place in ahead)
        ahead.clear()
        return self._latest, [Say(rank, Ask(self._latest, key, specs, returned))]

    def produced(self, number: int, ended: float) -> list[Instruction]:
        """The arrays of a message are there; nothing if it has been dropped."""
        if number not in self._outgoing:
            return []
        outgoing = self._outgoing[number]
        outgoing.state, outgoing.ended = "produced", ended
        if not packed(outgoing.specs, 1).size:
            return self.complete(number)
        return self._write(number, outgoing)

    def granted(self, rank: int, granted: Granted) -> list[Instruction]:
        """A rank gives a place.

        Raises:
            Refused: nobody asked for it, or it does not hold what it is for.
        """
        if rank in self._lost:
            return []
        if not granted.at:
            raise Refused(rank, f"gives place {granted.place} nowhere")
        number, named = granted.number, f"place {granted.place}"
        has = [out.place for out in self._outgoing.values() if out.place is not None and out.rank == rank]
        has += [place for (to, _), places in self._ahead.items() if to == rank for place in places]
        if any(place.place == granted.place for place in has):
            raise Refused(rank, f"gives {named} again")
        if number is None:
            self._ahead.setdefault((rank, granted.stage), []).append(granted)
            return []
        if (outgoing := self._mine(rank, number, f"gives {named} for")) is None:
            return []
        if not outgoing.asked or outgoing.place is not None or outgoing.key.stage != granted.stage:
            raise Refused(rank, f"gives {named} for the {outgoing.key}, which needs none there")
        if packed(outgoing.specs, len(granted.at)).size > granted.room:
            raise Refused(rank, f"gives {named} of {granted.room} bytes for the {outgoing.key}: too few")
        outgoing.place = granted
        return self._write(number, outgoing) if outgoing.state == "produced" else []

    def unwanted(self, rank: int, said: Unwanted) -> list[Instruction]:
        """A rank does not take a message.

        Raises:
            Refused: it was not asked for a place for it.
        """
        outgoing = self._mine(rank, said.number, "does not want")
        if outgoing is None or outgoing.state == "writing":  # it will hear how that ends
            return []
        if not outgoing.asked:
            raise Refused(rank, f"does not want the {outgoing.key}, for which it was not asked")
        return self._drop(said.number)

    def complete(self, number: int) -> list[Instruction]:
        """A write has ended: all is there."""
        outgoing = self._outgoing.pop(number, None)
        if outgoing is None:
            return []
        place = None if outgoing.place is None else outgoing.place.place
        said = Written(place, outgoing.key, outgoing.specs, outgoing.ended)
        return [Say(outgoing.rank, said), Delivered(number)]

    def reset(self, round: int) -> list[Instruction]:
        """A round is broken off: what is not being written will not be; earlier rounds go on."""
        waiting = [
            n for n, own in self._outgoing.items() if own.key.round >= round and own.state != "writing"
        ]
        return [done for number in waiting for done in self._drop(number)]

    def lost(self, rank: int) -> list[Instruction]:
        """A rank is gone: nothing is written to it any more."""
        self._lost.add(rank)
        gone = [number for number, own in self._outgoing.items() if own.rank == rank]
        for number in gone:
            del self._outgoing[number]
        for edge in [edge for edge in self._ahead if edge[0] == rank]:
            del self._ahead[edge]
        return [Forget(number) for number in gone]

    def key(self) -> Hashable:
        """All that it remembers, for those who compare states."""
        return (
            (self._latest, tuple(sorted(self._lost))),
            tuple((number, *vars(own).values()) for number, own in sorted(self._outgoing.items())),
            tuple((edge, tuple(places)) for edge, places in sorted(self._ahead.items())),
        )

    def _mine(self, rank: int, number: int, what: str) -> _Outgoing | None:
        """The message of this number; None if it has ended.

        Raises:
            Refused: it has not been offered, or not to this rank.
        """
        outgoing = self._outgoing.get(number)
        if not 0 < number <= self._latest or (outgoing is not None and outgoing.rank != rank):
            raise Refused(rank, f"{what} message {number}, which was not offered to it")
        return outgoing

    def _write(self, number: int, outgoing: _Outgoing) -> list[Instruction]:
        if outgoing.place is None:
            return []
        outgoing.state = "writing"
        return [Write(number, outgoing.rank, outgoing.specs, outgoing.place)]

    def _drop(self, number: int) -> list[Instruction]:
        """Its receiver hears of it only if it was asked; a place that was there is kept for the next."""
        outgoing = self._outgoing.pop(number)
        if outgoing.asked:
            return [Say(outgoing.rank, Dropped(number)), Forget(number)]
        if outgoing.place is not None:
            self._ahead.setdefault((outgoing.rank, outgoing.key.stage), []).append(outgoing.place)
        return [Forget(number)]
