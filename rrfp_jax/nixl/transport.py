"""The transport between processes that writes from device to device.

The machines of `receiver` and `sender` decide; here is what they lack: the mailbox, the agent, the slabs, and
the driver's `Transport`. A message is at its destination when its copy has been dispatched: the device runs
that before whatever takes the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax

from rrfp_jax.errors import TrainingError
from rrfp_jax.nixl.agent import Agent, Peers, WriteFailed
from rrfp_jax.nixl.memory import ALIGNMENT, Copiers, Slabs, groups_of, messages_to, room_for, slot_size
from rrfp_jax.nixl.messages import Ask, Dropped, Granted, Refused, Say, Unwanted, Written
from rrfp_jax.nixl.receiver import Copy, Home, Receiver
from rrfp_jax.nixl.sender import Release, Sender, Write
from rrfp_jax.nixl.slots import SLOTS, Give, Grow, SlabSlots
from rrfp_jax.nixl.trial import meet, speeds
from rrfp_jax.nixl.writes import FailedWrite, Writes
from rrfp_jax.runtime.run.frames import Message
from rrfp_jax.runtime.run.waits import pause
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.transport.protocol import (
    UNOBSERVED,
    Arrival,
    BetweenProcesses,
    Connected,
    Devices,
    Endpoints,
    Key,
    Messages,
    Offers,
    OneArrayCompiler,
    TransferObserver,
    specs_of,
)


class Ended(Message, frozen=True):
    """The sender of this writes nothing more, and takes nothing."""


class _Sent(NamedTuple):
    key: Key
    arrays: Sequence[jax.Array]


class NixlTransport(BetweenProcesses):
    """Offers to, and takes from, the other processes of a run. Made by all of them together."""

    def __init__(self, ends: Endpoints, agent: Agent, peers: Peers) -> None:
        world = ends.world
        assert world.mailbox is not None
        self._world, self._mailbox, self._receivers = world, world.mailbox, ends.receivers
        self._agent, self._peers, self._devices = agent, peers, ends.devices
        self._writes = Writes(agent, peers, self._leave_end)
        self._slabs, self._reserved = Slabs(agent, ends.devices, ends.compiler, SLOTS), False
        groups = self._slabs.groups
        homes = {stage: Home(groups.index((*own,)), len(own)) for stage, own in ends.devices.items()}
        self._receiver = Receiver([SlabSlots([0] * SLOTS) for _ in groups], homes)
        self._sender = Sender()
        self._round = 0
        self._offers = Offers()
        self._numbers: dict[Key, list[int]] = {}  # of the messages to each receiver, in this round
        self._sent: dict[int, _Sent] = {}  # by number, what has not ended
        self._copies: dict[int, tuple[Sequence[jax.Array], float]] = {}  # by place: tokens, beginning (s)
        self._arrived: list[Arrival] = []
        self._gone: set[int] = set()  # who is lost, or has ended
        self._told: set[int] = set()  # whom this process has said that it has ended, or writes to no more
        self._closed = False
        self._number = world.next_round()  # other transports of this run have others
        for kind, handler in self._handlers().items():
            self._mailbox.on(kind, handler, self._number)
        world.gather("everybody's slots", None, START_SECONDS)  # from now on others may send to this one

    @classmethod
    def connect(cls, ends: Endpoints) -> Connected:
        met = meet(ends.world, ends.devices, ends.neighbours)
        return Connected(cls(ends, met.agent, met.peers), "by NIXL", speeds(met.edges))

    @staticmethod
    def reserved_bytes(largest: int) -> int:
        return SLOTS * (room_for(largest) + ALIGNMENT)

    @staticmethod
    def compile_ahead(
        devices: Devices, compiler: OneArrayCompiler, first: Messages, later: Messages
    ) -> Mapping[int, int]:
        copiers = Copiers(compiler)
        kept: dict[int, int] = {}
        for group in groups_of(devices):
            messages = messages_to(first, devices, group)
            size = slot_size(messages, group) + ALIGNMENT
            copiers.prepare(group, {size}, messages + messages_to(later, devices, group))
            kept |= {stage: SLOTS * size for stage in devices if (*devices[stage],) == group}
        return kept

    def reserve(self, messages: Messages) -> Mapping[int, int]:
        """The first messages say how large slots are at the beginning."""
        if not self._reserved:
            self._reserved = True
            for slab, group in enumerate(self._slabs.groups):
                size = slot_size(messages_to(messages, self._devices, group), group)
                self._carry_out(self._receiver.reserve(slab, size))
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
            self._sent[number] = _Sent(key, arrays)
            self._carry_out(done)

    def produced(self, key: Key, at: float) -> None:
        for number in self._numbers.get(key, ()):
            self._carry_out(self._sender.produced(number, at + self._world.clock[0]))

    def poll(self) -> list[Arrival]:
        """Complete what can be.

        Raises:
            PeerLost: a process of the run is gone.
            TrainingError: a write failed, or something came that nobody may send.
        """
        self._mailbox.pump()
        if self._mailbox.membership.gone:
            for rank in self._mailbox.membership.gone.keys() - self._gone:
                self._forget(rank)
            self._mailbox.membership.require_all()
        for place, (tokens, _) in list(self._copies.items()) if self._copies else ():
            if all(token.is_ready() for token in tokens):  # type: ignore[attr-defined]
                del self._copies[place]
                self._carry_out(self._receiver.copied(place))
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
            self._writes.close()
            self._mailbox.leave(self._say_ended, 0, None)  # to post could wait, if garbage is collected now

    def _handlers(self) -> dict[type[Message], Callable[[int, Any], None]]:
        receiver, sender = self._receiver, self._sender
        return {
            Ask: self._heeding(receiver.asked),
            Written: self._heeding(receiver.written),
            Dropped: self._heeding(receiver.dropped),
            Granted: self._on_granted,
            Unwanted: self._heeding(sender.unwanted),
            Ended: self._on_ended,
        }

    def _heeding(self, machine: Callable[[int, Any], Sequence[Any]]) -> Callable[[int, Any], None]:
        """A handler of messages, which a machine answers."""

        def handle(rank: int, message: Message) -> None:
            if rank in self._gone or self._closed:
                return
            try:
                done = machine(rank, message)
            except Refused as refused:
                raise TrainingError(f"{self._world.describe(rank)} {refused}: this is refused") from None
            self._carry_out(done)

        return handle

    def _on_granted(self, rank: int, granted: Granted) -> None:
        if granted.metadata and rank not in self._gone:
            try:
                self._peers.know(rank, granted.metadata)
            except WriteFailed as error:
                self._mailbox.hear_of_losses()
                who = self._world.describe(rank)
                raise TrainingError(f"NIXL cannot reach {who}, which gave it a place: {error}") from None
        self._heeding(self._sender.granted)(rank, granted)

    def _say_ended(self, *_: Any) -> None:
        self._tell_ended(set(self._mailbox.ranks))
        self._let_go()

    def _on_ended(self, rank: int, _: Ended) -> None:
        self._forget(rank)
        self._tell_ended({rank})  # nor will this process write there
        if self._closed:
            self._let_go()

    def _tell_ended(self, ranks: set[int]) -> None:
        ranks -= self._told | self._writes.ranks
        self._told |= ranks
        for rank in ranks:
            self._mailbox.post(rank, Ended(), self._number)

    def _forget(self, rank: int) -> None:
        self._gone.add(rank)
        self._receiver.lost(rank)
        self._carry_out(self._sender.lost(rank))

    def _let_go(self) -> None:
        """Once nobody writes here any more, nor this process, the mailbox need not keep this alive."""
        if (
            not self._writes.ranks
            and self._gone >= set(self._mailbox.ranks) - self._mailbox.membership.gone.keys()
        ):
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
                    self._mailbox.post(one.rank, self._slabs.granted(one), self._number)
                case Copy():
                    self._copy(one)
                case Grow():
                    self._slabs.grow(one)

    def _copy(self, copy: Copy) -> None:
        self._offers.observer.coming(copy.key)
        arrays, ended = self._slabs.copy(copy.slab, copy.slot, copy.specs)
        if copy.place is not None:
            self._copies[copy.place] = ended, perf_counter()
        self._arrived.append(Arrival(copy.key, arrays, copy.ended - self._world.clock[0]))

    def _write(self, write: Write) -> None:
        try:
            ended = self._writes.begin(write, *self._sent[write.number])
        except FailedWrite as failed:
            raise self._error(failed) from None
        if ended:
            self._carry_out(self._sender.complete(write.number))  # first: somebody waits for it
            self._writes.end(write.number)

    def _leave_end(self, number: int) -> None:
        """From the thread that watches writes."""
        self._mailbox.leave(self._on_end_of_write, number, None)

    def _on_end_of_write(self, number: int, _: None) -> None:
        try:
            rank = self._writes.end(number)
        except FailedWrite as failed:
            if failed.rank in self._gone or self._closed:
                return
            raise self._error(failed) from None
        self._carry_out(self._sender.complete(number))
        if self._closed:
            self._tell_ended({rank})
            self._let_go()

    def _error(self, failed: FailedWrite) -> TrainingError:
        """A write has failed, perhaps since its receiver is gone, of which one hears a little later."""
        self._mailbox.hear_of_losses()
        to = self._world.describe(failed.rank)
        return TrainingError(f"the write of the {failed.key} to {to} failed: {failed}")
