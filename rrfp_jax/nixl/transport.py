"""The transport between processes that writes from device to device.

The machines of `receiver` and `sender` decide; here is what they lack: the mailbox, the agent, the slabs, the
writes under way, and the driver's `Transport`. Arrays are written from where they lie, which costs less here
than to pack them first. A message is at its destination when its copy has been dispatched: the device runs
that before whatever takes the arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import jax

from rrfp_jax.errors import TrainingError
from rrfp_jax.nixl.agent import Agent, HasEnded, MemoryRange, Sources, WriteFailed
from rrfp_jax.nixl.memory import ALIGNMENT, Copiers, Slabs, by_slab, memory_of, packed, room_for, slot_size
from rrfp_jax.nixl.receiver import SLOTS, Copy, Give, Grow, Receiver, Slab
from rrfp_jax.nixl.sender import (
    Ask,
    Dropped,
    Granted,
    Refused,
    Release,
    Say,
    Sender,
    Unwanted,
    Write,
    Written,
)
from rrfp_jax.nixl.trial import meet, speeds
from rrfp_jax.runtime.run.mailbox import Message
from rrfp_jax.runtime.run.waits import pause
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.transport.protocol import (
    UNOBSERVED,
    Arrival,
    BetweenProcesses,
    Connected,
    Devices,
    Endpoints,
    Kept,
    Key,
    Messages,
    Offers,
    OneArrayCompiler,
    TransferObserver,
    specs_of,
)

LOOK_SECONDS = 5e-5
"""A write is looked at for so long before a thread watches it: about what it costs to wake that thread."""


class Ended(Message, frozen=True):
    """The sender of this writes nothing more, and takes nothing."""


class _Sent(NamedTuple):
    rank: int
    key: Key
    arrays: Sequence[jax.Array]


class NixlTransport(BetweenProcesses):
    """Offers to, and takes from, the other processes of a run. Made by all of them together."""

    def __init__(self, ends: Endpoints, agent: Agent) -> None:
        self._world, self._receivers, self._devices = ends.world, ends.receivers, ends.devices
        assert ends.world.mailbox is not None
        self._mailbox = ends.world.mailbox
        self._agent, self._sources = agent, Sources(agent)
        self._slabs, self._reserved = Slabs(agent, ends.devices, ends.compiler, SLOTS), False
        groups = self._slabs.groups
        stages = {stage: groups.index((*own,)) for stage, own in ends.devices.items()}
        self._receiver = Receiver([Slab([0] * SLOTS, len(group)) for group in groups], stages)
        self._sender = Sender()
        self._round = 0
        self._offers = Offers()
        self._numbers: dict[Key, list[int]] = {}  # of the messages to each receiver, in this round
        self._sent: dict[int, _Sent] = {}  # by number, what has not ended
        self._writing: dict[int, tuple[_Sent, Sequence[MemoryRange]]] = {}  # whose arrays must stay
        self._watched: SimpleQueue[tuple[int, HasEnded] | None] = SimpleQueue()
        self._watches = False  # a thread does; not before the first write that takes longer
        self._copies: dict[int, tuple[Sequence[jax.Array], float]] = {}  # by place: tokens, beginning (s)
        self._arrived: list[Arrival] = []
        self._gone: set[int] = set()  # who is lost, or has ended
        self._told: set[int] = set()  # whom this process has said that it has ended, or writes to no more
        self._closed = False
        self._number = self._world.next_round()  # other transports of this run have others
        machines: Mapping[type[Message], Callable[[int, Any], Sequence[Any]]] = {
            Ask: self._receiver.asked,
            Written: self._receiver.written,
            Dropped: self._receiver.dropped,
            Granted: self._sender.granted,
            Unwanted: self._sender.unwanted,
        }
        for kind, machine in machines.items():
            self._mailbox.on(kind, partial(self._heed, machine), self._number)
        self._mailbox.on(Ended, self._on_ended, self._number)
        self._world.gather("everybody's slots", None, START_SECONDS)  # now others may send to this one

    @classmethod
    def connect(cls, ends: Endpoints) -> Connected:
        agent, edges = meet(ends.world, ends.devices, ends.neighbours)
        return Connected(cls(ends, agent), "by NIXL", speeds(edges))

    @staticmethod
    def reserved_bytes(largest: int) -> int:
        return SLOTS * (room_for(largest) + ALIGNMENT)

    @staticmethod
    def compile_ahead(devices: Devices, compiler: OneArrayCompiler, first: Messages, later: Messages) -> Kept:
        copiers, more = Copiers(compiler), by_slab(devices, later)
        sizes = {}
        for group, messages in by_slab(devices, first).items():
            sizes[group] = size = slot_size(messages, group) + ALIGNMENT
            copiers.prepare(group, {size}, messages + more[group])
        return {stage: SLOTS * sizes[*own,] for stage, own in devices.items()}

    def reserve(self, messages: Messages) -> Kept:
        """The first messages say how large slots are at the beginning."""
        if not self._reserved:
            self._reserved = True
            for slab, (group, own) in enumerate(by_slab(self._devices, messages).items()):
                self._carry_out(self._receiver.reserve(slab, slot_size(own, group)))
        self._slabs.prepare(messages)
        return self._slabs.nbytes()

    def begin(self, round: int, observer: TransferObserver = UNOBSERVED) -> None:
        if not self._reserved:
            self.reserve({})
        self._round = round
        self._offers.begin(round, observer)
        self._numbers.clear()
        self._agent.check_strangers()
        self._carry_out(self._receiver.begin(round))

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        receivers = self._receivers[key.stage]
        self._offers.add(key, len(receivers))
        numbers, specs = self._numbers.setdefault(key, []), specs_of(arrays)
        for rank in receivers:
            number, done = self._sender.offer(rank, key, specs)
            numbers.append(number)
            self._sent[number] = _Sent(rank, key, arrays)
            self._carry_out(done)

    def produced(self, key: Key, at: float) -> None:
        for number in self._numbers.get(key, ()):
            self._carry_out(self._sender.produced(number, at + self._world.clock[0]))

    def poll(self) -> list[Arrival]:
        """Complete what can be; PeerLost if a process is gone, TrainingError for a write that failed."""
        self._mailbox.pump()
        if self._mailbox.membership.gone:
            for rank in self._mailbox.membership.gone.keys() - self._gone:
                self._forget(rank)
            self._mailbox.membership.require_all()
        for place, (tokens, _) in list(self._copies.items()) if self._copies else ():
            if all(token.is_ready() for token in tokens):  # type: ignore[attr-defined]
                del self._copies[place]
                self._carry_out(self._receiver.release(place))
        arrived, self._arrived = self._arrived, []
        return arrived

    def seconds_until_poll(self) -> float | None:
        """The end of a copy need not be noticed unless its slot is awaited."""
        if self._arrived:
            return 0.0
        if not (self._copies and self._receiver.awaited):
            return None
        return pause(perf_counter() - max(began for _, began in self._copies.values()))

    def finish(self, *, broken: bool = False) -> None:
        self._offers.finish()
        if broken:
            self._arrived.clear()
            self._carry_out(self._receiver.reset())
            self._carry_out(self._sender.reset(self._round))

    def close(self) -> None:
        """Slots stay until nobody can write to them any more."""
        if not self._closed:
            self._closed = True
            self._watched.put(None)
            # Posting could wait, if garbage is collected now.
            self._mailbox.call_soon(self._say_ended, 0, None)

    def _heed(self, machine: Callable[[int, Any], Sequence[Any]], rank: int, message: Message) -> None:
        if rank in self._gone or self._closed:
            return
        try:
            if isinstance(message, Granted) and message.metadata:
                self._agent.know(rank, message.metadata)
            done = machine(rank, message)
        except WriteFailed as error:
            self._mailbox.hear_of_losses()
            who = self._world.describe(rank)
            raise TrainingError(f"NIXL cannot reach {who}, which gave it a place: {error}") from None
        except Refused as refused:
            raise TrainingError(f"{self._world.describe(rank)} {refused}: this is refused") from None
        self._carry_out(done)

    def _say_ended(self, *_: Any) -> None:
        self._tell_ended(set(self._mailbox.ranks))
        self._let_go()

    def _on_ended(self, rank: int, _: Ended) -> None:
        self._forget(rank)
        self._tell_ended({rank})  # nor will this process write there
        if self._closed:
            self._let_go()

    def _tell_ended(self, ranks: set[int]) -> None:
        ranks -= self._told | {sent.rank for sent, _ in self._writing.values()}
        self._told |= ranks
        for rank in ranks:
            self._mailbox.post(rank, Ended(), self._number)

    def _forget(self, rank: int) -> None:
        self._gone.add(rank)
        self._receiver.lost(rank)
        self._carry_out(self._sender.lost(rank))

    def _let_go(self) -> None:
        """Once nobody writes here any more, nor this process, the mailbox need not keep this alive."""
        others = set(self._mailbox.ranks) - self._mailbox.membership.gone.keys()
        if not self._writing and self._gone >= others:
            self._mailbox.off(self._number)

    def _carry_out(self, done: Sequence[Any]) -> None:
        for one in done:
            match one:
                case Say():
                    self._mailbox.post(one.rank, one.message, self._number)
                case Write():
                    self._write(one)
                case Release():
                    self._offers.delivered(self._sent.pop(one.number).key)
                case Give():
                    at, metadata = self._slabs.address(one.rank, one.slab, one.slot)
                    granted = Granted(one.place, one.stage, one.number, one.room, at, metadata)
                    self._mailbox.post(one.rank, granted, self._number)
                case Copy():
                    self._offers.observer.coming(one.key)
                    arrays, ended = self._slabs.copy(one.slab, one.slot, one.specs)
                    if one.place is not None:
                        self._copies[one.place] = ended, perf_counter()
                    self._arrived.append(Arrival(one.key, arrays, one.ended - self._world.clock[0]))
                case Grow():
                    self._slabs.grow(*one)

    def _write(self, write: Write) -> None:
        sent, at = self._sent[write.number], write.place.at
        parts = packed(write.specs, len(at)).parts
        memory = [memory_of(array) for array in sent.arrays if array.size]
        there = [MemoryRange(at[d][0] + offset, size, at[d][1]) for d, offset, size in parts if size]
        try:
            self._sources.take(memory)
            try:
                has_ended = self._agent.write(write.rank, memory, there)
                ended = _ends_soon(has_ended)
            except WriteFailed:
                self._sources.leave(memory)
                raise
        except WriteFailed as failed:
            raise self._error(sent, str(failed)) from None
        self._writing[write.number] = sent, memory
        if ended:
            self._on_end_of_write(write.number, "")
            return
        self._watched.put((write.number, has_ended))
        if not self._watches:
            self._watches = True
            own = (self._watched, partial(self._mailbox.call_soon, self._on_end_of_write))
            threading.Thread(target=_watch, args=own, name="rrfp-writes", daemon=True).start()

    def _on_end_of_write(self, number: int, error: str) -> None:
        try:
            if not error:
                self._carry_out(self._sender.complete(number))  # first: somebody waits for it
        finally:
            sent, memory = self._writing.pop(number)
            self._sources.leave(memory)
        if error and not self._closed and sent.rank not in self._gone:
            raise self._error(sent, error)
        if self._closed:
            self._tell_ended({sent.rank})
            self._let_go()

    def _error(self, sent: _Sent, reason: str) -> TrainingError:
        """A write has failed, perhaps since its receiver is gone, of which one hears a little later."""
        self._mailbox.hear_of_losses()
        to = self._world.describe(sent.rank)
        return TrainingError(f"the write of the {sent.key} to {to} failed: {reason}")


def _ends_soon(has_ended: HasEnded) -> bool:
    until = perf_counter() + LOOK_SECONDS
    while not (ended := has_ended()) and perf_counter() < until:
        pass
    return ended


def _watch(new: SimpleQueue[tuple[int, HasEnded] | None], tell: Callable[[int, str], None]) -> None:
    """Look at writes until they have ended, in a thread; tell of each, and why it failed."""
    watched: dict[int, HasEnded] = {}
    since, more = 0.0, True
    while watched or more:
        with suppress(Empty):
            found = new.get(timeout=pause(perf_counter() - since) if watched else None)
            since, more = perf_counter(), found is not None
            watched |= [found] if found is not None else []
        for number, has_ended in list(watched.items()):
            error = ""
            try:
                if not has_ended():
                    continue
            except WriteFailed as failed:
                error = str(failed)
            del watched[number]
            since = perf_counter()  # the next one may be short
            tell(number, error)
