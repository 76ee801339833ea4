"""The transport between processes that writes from device to device.

The machines of `receiver` and `sender` decide; here is what they lack: the mailbox, the agent, the slabs, and
the driver's `Transport`. A message is at its destination when its copy has been dispatched: the device runs
that before whatever takes the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.frames import Message
from rrfp_jax.runtime.run.waits import pause
from rrfp_jax.runtime.run.world import START_SECONDS, World
from rrfp_jax.runtime.transport.nixl.agent import Agent, Peers, WriteFailed
from rrfp_jax.runtime.transport.nixl.copies import Copies
from rrfp_jax.runtime.transport.nixl.messages import Ask, Dropped, Granted, Refused, Unwanted, Written
from rrfp_jax.runtime.transport.nixl.receiver import Copy, Decline, Receiver, Slabs
from rrfp_jax.runtime.transport.nixl.sender import Delivered, Failed, Forget, Say, Sender, Write, Writes
from rrfp_jax.runtime.transport.nixl.slots import SLOTS, Foreseen, Give, Grow, Slots
from rrfp_jax.runtime.transport.protocol import NOBODY, Arrival, Devices, Key, Specs, Witness, specs_of


class Ended(Message, frozen=True):
    """The sender of this writes nothing more, and takes nothing."""


class _Sent(NamedTuple):
    key: Key
    arrays: Sequence[jax.Array]


class NixlTransport:
    """Offers to, and takes from, the other processes of a run. Made by all of them together.

    Args:
        world: the run.
        receivers: by stage replica (see `Layout`), the ranks to which this process sends what is for it.
        devices: of this process's stages.
        agent: of this process.
        peers: the other processes' agents.
        foreseen: of messages to this process.
    """

    def __init__(
        self,
        world: World,
        receivers: Sequence[Sequence[int]],
        devices: Devices,
        agent: Agent,
        peers: Peers,
        foreseen: Foreseen,
    ) -> None:
        assert world.mailbox is not None
        self._world, self._mailbox, self._receivers = world, world.mailbox, receivers
        self._agent, self._peers = agent, peers
        self._writes = Writes(agent, peers, self._leave_end)
        self._slabs = Slabs(agent, devices, foreseen, SLOTS)
        self._slabs.prepare(foreseen.messages)
        self._receiver = Receiver(list(map(Slots, self._slabs.sizes)), self._slabs.homes)
        self._sender = Sender()
        self._round = 0
        self._witness: Witness = NOBODY
        self._offered: dict[Key, list[int]] = {}  # in this round: the numbers of its messages
        self._sent: dict[int, _Sent] = {}  # by number, what has not ended
        self._left: dict[Key, int] = {}  # to how many ranks not yet
        self._copies = Copies()
        self._arrived: list[Arrival] = []
        self._gone: set[int] = set()  # who is lost, or has ended
        self._told: set[int] = set()  # whom this process has said that it has ended, or writes to no more
        self._closed = False
        self._number = world.next_round()  # other transports of this run have others
        for kind, handler in self._handlers().items():
            self._mailbox.on(kind, handler, self._number)
        world.gather("everybody's slots", None, START_SECONDS)  # from now on others may send to this one

    def prepare(self, messages: Mapping[int, Collection[Specs]]) -> None:
        """Compile what copies such messages out of slots, by stage, if that has not been done."""
        self._slabs.prepare(messages)

    def slot_bytes(self) -> Mapping[int, int]:
        """What slots take of a device's memory; see `Slabs.nbytes`."""
        return self._slabs.nbytes()

    def begin(self, round: int, devices: Devices, witness: Witness = NOBODY) -> None:
        """See `Transport.begin`. The devices are those that it was made for."""
        self._round, self._witness = round, witness
        self._offered.clear()
        self._agent.check_strangers()
        self._carry_out(self._receiver.begin(round))

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """See `Transport.offer`."""
        if key in self._offered:
            raise ValueError(f"{key} has been offered before")
        receivers = self._receivers[key.stage]
        numbers = self._offered[key] = []
        if not receivers:  # they get it from other ranks of the stage
            self._witness.delivered(key)
            return
        self._left[key] = len(receivers)
        specs = specs_of(arrays)
        for rank in receivers:
            number, done = self._sender.offer(rank, key, specs)
            numbers.append(number)
            self._sent[number] = _Sent(key, arrays)
            self._carry_out(done)

    def produced(self, key: Key, at: float) -> None:
        """See `Transport.produced`."""
        for number in self._offered.get(key, ()):
            self._carry_out(self._sender.produced(number, at + self._world.clock[0]))

    def poll(self) -> list[Arrival]:
        """See `Transport.poll`.

        Raises:
            PeerLost: a process of the run is gone.
            TrainingError: a write failed, or something came that nobody may send.
        """
        self._mailbox.pump()
        if self._mailbox.membership.gone:
            for rank in self._mailbox.membership.gone.keys() - self._gone:
                self._forget(rank)
            self._mailbox.membership.require_all()
        for place in self._copies.ended() if self._copies else ():
            self._carry_out(self._receiver.copied(place))
        arrived, self._arrived = self._arrived, []
        return arrived

    def patience(self) -> float | None:
        """See `Transport.patience`. Of a copy nobody need hear unless its slot is awaited."""
        if self._arrived:
            return 0.0
        if not (self._copies and self._receiver.awaited):
            return None
        return pause(perf_counter() - self._copies.since)

    def end(self) -> None:
        """See `Transport.end`."""
        self._witness = NOBODY

    def reset(self) -> None:
        """See `Transport.reset`."""
        self._witness = NOBODY
        self._arrived.clear()
        self._carry_out(self._receiver.reset())
        self._carry_out(self._sender.reset(self._round))

    def close(self) -> None:
        """See `Transport.close`. Slots stay until nobody can write to them any more."""
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
                case Say() | Decline():
                    self._mailbox.post(one.rank, one.message, self._number)
                case Write():
                    self._write(one)
                case Delivered() | Forget():
                    self._let_arrays_go(one.number)
                case Give():
                    self._mailbox.post(one.rank, self._slabs.granted(one), self._number)
                case Copy():
                    self._copy(one)
                case Grow():
                    self._slabs.grow(one)

    def _copy(self, copy: Copy) -> None:
        self._witness.coming(copy.key)
        arrays, ended = self._slabs.copy(copy)
        if copy.place is not None:
            self._copies.begin(copy.place, ended)
        self._arrived.append(Arrival(copy.key, arrays, copy.ended - self._world.clock[0]))

    def _write(self, write: Write) -> None:
        try:
            ended = self._writes.begin(write, *self._sent[write.number])
        except Failed as failed:
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
        except Failed as failed:
            if failed.rank in self._gone or self._closed:
                return
            raise self._error(failed) from None
        self._carry_out(self._sender.complete(number))
        if self._closed:
            self._tell_ended({rank})
            self._let_go()

    def _let_arrays_go(self, number: int) -> None:
        key, _ = self._sent.pop(number)
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
            if key.round == self._round:
                self._witness.delivered(key)

    def _error(self, failed: Failed) -> TrainingError:
        """A write has failed, perhaps since its receiver is gone, of which one hears a little later."""
        self._mailbox.hear_of_losses()
        to = self._world.describe(failed.rank)
        return TrainingError(f"the write of the {failed.key} to {to} failed: {failed}")
