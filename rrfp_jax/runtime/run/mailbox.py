"""Control messages between the processes of a run: one socket per pair, small frames, nothing blocks.

Messages from one process arrive in the order in which they were posted. The driver reads them when it runs or
sleeps, else the watchdog does. What was read waits in an inbox until the main thread pumps, so handlers run
in one thread only.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, Protocol, TypeVar

import msgspec

from rrfp_jax.runtime.run.frames import Connection, ConnectionLost, Frame, Message, pack
from rrfp_jax.runtime.run.membership import Departures


class Bell(Protocol):
    """Wakes one sleeper. The mailbox of a process of several is one, too: messages ring it."""

    def ring(self) -> None:
        """Wake the sleeper, or let its next sleep end at once; from any thread."""

    def sleep(self, seconds: float) -> None:
        """Sleep until a ring, at most so long."""


class EventBell:
    """For a process that is alone."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        """See `Bell.ring`."""
        self._event.set()

    def sleep(self, seconds: float) -> None:
        """See `Bell.sleep`."""
        if self._event.wait(seconds):
            self._event.clear()


SAMPLES = 32
"""The quickest of so many latest round trips counts; older ones may have drifted."""


class PeerClock:
    """The offset of rank 0's clock, from round trips: sent here, answered there, back here.

    If the way there and the way back took equally long, the answer was given half-way; at worst one of them
    took no time at all, so the offset is known to within half of the round trip (as in NTP).
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # round trip, offset
        self._best = 0.0, 0.0  # kept apart, because one thread samples while another reads

    def sample(self, sent: float, theirs: float, back: float) -> None:
        """Note one round trip; times in seconds, `theirs` on rank 0's clock, the others on this one's."""
        self._samples.append((back - sent, theirs - (sent + back) / 2))
        self._best = min(self._samples)

    @property
    def offset(self) -> float:
        """Add this to a time of this process to have it on rank 0's clock (s); 0 before any sample."""
        return self._best[1]

    @property
    def precision(self) -> float:
        """Largest possible error of the offset (s)."""
        return self._best[0] / 2

    @property
    def samples(self) -> int:
        """How many round trips are known, at most `SAMPLES`."""
        return len(self._samples)


FULL_RETRY_SECONDS = 1e-3
"""Pause before a full socket is tried again."""

LOSS_SECONDS = 2.0
"""Data fails to come as soon as its sender dies; that it has, this process may hear a little later."""

M = TypeVar("M", bound=Message)


class Goodbye(Message, frozen=True):
    """The sender has done its part."""


class Failed(Message, frozen=True):
    """The sender ends: by whose fault, and why."""

    culprit: int
    sentence: str


class Mailbox:
    """This process's connections to the others of the run.

    Args:
        rank: of this process.
        sockets: connected and authenticated, by rank.

    Attributes:
        connections: by rank.
        departures: who takes no further part.
        lock: held by whoever reads, sends or closes, all of which take no time.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.connections = {r: Connection(r, s) for r, s in sorted(sockets.items())}
        self.departures = Departures(self.ranks)
        self.lock = threading.Lock()
        self._inbox: deque[tuple[Callable[[int, Any], None], int, Message]] = deque()
        # By channel, then by kind: what decodes it, its handler, whether that is called at once.
        self._channels: dict[int, dict[str, tuple[msgspec.msgpack.Decoder[Any], Any, bool]]] = {}
        self._ended: set[int] = set()  # channels
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._ring_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._ring_end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        for connection in self.connections.values():
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self.on_reading(Goodbye, lambda peer, said: self.departures.left(peer.rank))
        self.on_reading(
            Failed, lambda peer, said: self.departures.failed(peer.rank, said.culprit, said.sentence)
        )

    @property
    def ranks(self) -> Collection[int]:
        """The other processes."""
        return self.connections.keys()

    def on(self, kind: type[M], handler: Callable[[int, M], None], channel: int = 0) -> None:
        """Have messages of a kind handled by `handler(rank, message)`, in the thread that pumps.

        Raises:
            ValueError: a class of this name has a handler on this channel.
        """
        self._register(kind, handler, channel, False)

    def on_reading(self, kind: type[M], handler: Callable[[Connection, M], None]) -> None:
        """Have messages of a kind handled at once by whoever reads, who holds the lock.

        Raises:
            ValueError: see `on`.
        """
        self._register(kind, handler, 0, True)

    def off(self, channel: int) -> None:
        """Let go of a channel's handlers for good; what still comes there is dropped. From any thread."""
        self._ended.add(channel)  # first: a message must find one or the other
        self._channels.pop(channel, None)

    def post(self, rank: int, message: Message, channel: int = 0) -> None:
        """Send a message to a process; returns at once, also if that process is gone."""
        self._send([self.connections[rank]], pack(message, channel))

    def post_all(self, message: Message, channel: int = 0, *, but: Collection[int] = ()) -> None:
        """Send a message to every other process, but these."""
        peers = [peer for rank, peer in self.connections.items() if rank not in but]
        self._send(peers, pack(message, channel))

    def pump(self) -> None:
        """Hand what has come to its handlers; returns at once. Main thread only."""
        with self.lock:
            self._read()
        while self._inbox:
            handler, rank, message = self._inbox.popleft()
            handler(rank, message)

    def read(self) -> None:
        """Read what has come, and leave it to the thread that pumps; from the watchdog."""
        with self.lock:
            news = self._read()
        if news:
            self.ring()  # the main thread may just have gone to sleep on what has been taken away here

    def leave(self, handler: Callable[[int, Any], None], number: int, what: Any) -> None:
        """Have the thread that pumps call `handler(number, what)`; from any thread."""
        self._inbox.append((handler, number, what))
        self.ring()

    def hear_of_losses(self) -> None:
        """Something between processes has failed, perhaps since one is gone: wait a while to hear of that.

        Raises:
            PeerLost: one is.
        """
        deadline = perf_counter() + LOSS_SECONDS
        while perf_counter() < deadline:
            self.departures.require_all()
            self.sleep(0.1)
            self.pump()

    def ring(self) -> None:
        """Wake whoever sleeps; from any thread."""
        with suppress(OSError):  # it holds enough rings already, or is closed
            self._ring_end.send(b"\0")

    def sleep(self, seconds: float) -> None:
        """Sleep until a ring or a message comes, at most so long.

        `select` on the selector itself, because epoll rounds its timeout up to milliseconds.
        """
        if not self._all_sent():
            seconds = min(seconds, FULL_RETRY_SECONDS)
        select.select([self._selector], [], [], max(seconds, 0.0))  # type: ignore[list-item]

    def flushed(self) -> bool:
        """Whether everything posted is on its way."""
        self._send(self.connections.values(), b"")
        return self._all_sent()

    def close(self) -> None:
        """Close all connections."""
        with self.lock:
            self.let_go()

    def let_go(self) -> None:
        """Do so without the lock; in a forked child, where some other thread may hold it for ever."""
        self._closed = True
        self._selector.close()
        self._wake_end.close()
        self._ring_end.close()
        for connection in self.connections.values():
            connection.socket.close()

    def _register(self, kind: type[M], handler: Callable[..., None], channel: int, at_once: bool) -> None:
        known = self._channels.setdefault(channel, {})
        if kind.__name__ in known:
            raise ValueError(f"messages {kind.__name__!r} on channel {channel} have a handler already")
        known[kind.__name__] = msgspec.msgpack.Decoder(kind), handler, at_once

    def _all_sent(self) -> bool:
        return not any(connection.unsent for connection in self.connections.values())

    def _send(self, to: Collection[Connection], frame: bytes) -> None:
        with self.lock:
            for connection in () if self._closed else to:
                connection.send(frame)

    def _read(self) -> bool:
        """Read what has come and send on what waits; whether anything had come. Holding the lock."""
        if self._closed:
            return False
        found = self._selector.select(0)
        for key, _ in found:
            if key.data is None:
                self._wake_end.recv(4096)
            else:
                self._receive(key.data)
        for connection in self.connections.values():
            connection.flush()
        return bool(found)

    def _receive(self, connection: Connection) -> None:
        try:
            for frame in connection.receive():
                self._file(connection, frame)
        except ConnectionLost as lost:
            self._selector.unregister(connection.socket)
            self.departures.lost(connection.rank, str(lost))

    def _file(self, connection: Connection, frame: Frame) -> None:
        known = self._channels.get(frame.channel, {}).get(frame.kind)
        if known is None and frame.channel in self._ended:
            return
        if known is None:
            raise ConnectionLost(f"sent an unknown message {frame.kind!r}")
        decoder, handler, at_once = known
        try:
            message = decoder.decode(frame.body)
        except msgspec.DecodeError as error:
            raise ConnectionLost(f"sent a message {frame.kind!r} that is none: {error}") from None
        if at_once:
            handler(connection, message)
        else:
            self._inbox.append((handler, connection.rank, message))


class Beat(Message, frozen=True):
    """The sender lives; rank 0 answers with its time."""

    sent: float  # by the sender's `perf_counter`, in seconds, as are all times here


class Echo(Message, frozen=True):
    """Rank 0's answer: the time that it was sent, and its own."""

    sent: float
    theirs: float


class Heartbeat:
    """The heartbeat of a process of several. Made before its mailbox is read.

    Args:
        mailbox: to the others.

    Attributes:
        clock: what is known of rank 0's.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.clock = PeerClock()
        self._mailbox, self._judged = mailbox, perf_counter()
        mailbox.on_reading(Beat, self._answer)
        mailbox.on_reading(Echo, lambda peer, echo: self.clock.sample(echo.sent, echo.theirs, peer.heard))

    def beat(self) -> None:
        """Tell the others that this process lives, and ask rank 0 for its time; from any thread."""
        self._mailbox.post_all(Beat(perf_counter()), but=self._mailbox.departures.gone.keys())

    def judge_silence(self, limit: float) -> None:
        """Give up processes from which nothing has come for `limit` seconds; call often, after reading.

        If this process itself stood still, so may all have (Ctrl-Z): then their silence says nothing yet.
        """
        with self._mailbox.lock:
            now = perf_counter()
            stood_still, self._judged = now - self._judged > limit / 2, now
            for rank, peer in self._mailbox.connections.items():
                silence = now - peer.heard
                if stood_still:
                    peer.heard = now
                elif silence > limit:
                    reason = f"has not been heard from for {silence:.0f} s: frozen or cut off"
                    self._mailbox.departures.lost(rank, reason)

    def await_hang_up(self, seconds: float, other: int) -> bool:
        """Wait until a process that is not known to be gone closes its connection; whether any did.

        Reads nothing.

        Args:
            seconds: at most so long.
            other: a descriptor that ends the wait, too, by becoming readable.
        """
        poll = select.poll()
        poll.register(other, select.POLLIN)
        for rank, peer in self._mailbox.connections.items():
            if rank not in self._mailbox.departures.gone:
                poll.register(peer.socket, getattr(select, "POLLRDHUP", 0))
        return any(number != other for number, _ in poll.poll(1000 * seconds))

    def _answer(self, peer: Connection, beat: Beat) -> None:
        if self._mailbox.rank == 0:
            peer.send(pack(Echo(beat.sent, perf_counter())))
