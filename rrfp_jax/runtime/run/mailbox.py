"""Control messages between the processes of a run: one socket per pair, small frames, nothing blocks.

Messages from one process arrive in the order in which they were posted. The driver reads them when it runs or
sleeps, else the watchdog does. What was read waits in an inbox until the main thread pumps, so handlers run
in one thread only. What processes say of themselves goes to `Membership` as soon as it is read.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import Any, Protocol, TypeVar, get_args

import msgspec

from rrfp_jax.runtime.run.frames import Frame, Message, pack, unpack
from rrfp_jax.runtime.run.membership import Gone, Membership, Said, Send

READ_AT_ONCE = 2**18  # bytes

FULL_RETRY_SECONDS = 1e-3
"""Pause before a full socket is tried again."""

LOSS_SECONDS = 2.0
"""Data fails to come as soon as its sender dies; that it has, this process may hear a little later."""

M = TypeVar("M", bound=Message)
Decoder = msgspec.msgpack.Decoder

SAID = {kind.__name__: Decoder(kind) for kind in get_args(Said)}


class Wakeup(Protocol):
    """Wakes one sleeper. The mailbox of a process of several is one, too: messages ring it."""

    def ring(self) -> None:
        """Wake the sleeper, or let its next sleep end at once; from any thread."""

    def sleep(self, seconds: float) -> None:
        """Sleep until a ring, at most so long."""


class EventWakeup:
    """For a process that is alone."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def sleep(self, seconds: float) -> None:
        if self._event.wait(seconds):
            self._event.clear()


class ConnectionLost(Exception):
    """The other end is gone, or sent nonsense; the message goes on after its name."""


class Connection:
    """The connection to one process. One thread at a time: see `Mailbox`."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank, self.socket = rank, connected
        self.unsent, self._unread = bytearray(), bytearray()
        connected.setblocking(False)

    def send(self, frame: bytes) -> None:
        """Send a frame behind those before; returns at once, also if the other end is gone."""
        self.unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send what waits, as much as the socket takes."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # reading says why, after what came before
            self.unsent.clear()

    def read(self) -> bool:
        """Read what has come; returns at once. Whether anything had."""
        try:
            data = self.socket.recv(READ_AT_ONCE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(f"is gone ({error.strerror}): killed, crashed or cut off") from None
        if not data:
            raise ConnectionLost("closed its connection without a word: killed, crashed or cut off")
        self._unread += data
        return True

    def next_frame(self) -> Frame | None:
        """The next frame of what was read; None if it is not there in full."""
        try:
            return unpack(self._unread)
        except ValueError as error:
            raise ConnectionLost(f"sent {error}") from None


class Mailbox:
    """This process's connections, which are authenticated, to the others of the run.

    `lock` is held by whoever reads, sends or closes, all of which take no time.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], silence: float = inf) -> None:
        self.connections = {r: Connection(r, s) for r, s in sorted(sockets.items())}
        self.membership = Membership(rank, self.connections.keys(), perf_counter(), silence)
        self.lock = threading.Lock()
        self._inbox: deque[tuple[Callable[[int, Any], None], int, Message]] = deque()
        self._handlers: dict[int, dict[str, tuple[Decoder[Any], Any]]] = {}  # by channel and name
        self._ended: set[int] = set()  # channels
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._ring_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._ring_end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        for connection in self.connections.values():
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    @property
    def ranks(self) -> Collection[int]:
        """The other processes."""
        return self.connections.keys()

    def on(self, kind: type[M], handler: Callable[[int, M], None], channel: int = 0) -> None:
        """Have messages of a kind handled by `handler(rank, message)`, in the thread that pumps.

        Raises:
            ValueError: a class of this name has a handler on this channel.
        """
        known = self._handlers.setdefault(channel, {})
        if kind.__name__ in known or (channel == 0 and kind.__name__ in SAID):
            raise ValueError(f"messages {kind.__name__!r} on channel {channel} have a handler already")
        known[kind.__name__] = Decoder(kind), handler

    def off(self, channel: int) -> None:
        """Let go of a channel's handlers for good; what still comes there is dropped. From any thread."""
        self._ended.add(channel)  # first: a message must find one or the other
        self._handlers.pop(channel, None)

    def post(self, rank: int, message: Message, channel: int = 0) -> None:
        """Send a message to a process; returns at once, also if that process is gone."""
        frame = pack(message, channel)
        with self.lock:
            self._send([rank], frame)

    def post_all(self, message: Message, channel: int = 0) -> None:
        """Send a message to every other process."""
        frame = pack(message, channel)
        with self.lock:
            self._send(self.ranks, frame)

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

    def tick(self) -> Gone | None:
        """Read, judge who is silent, and show a sign of life; for whom to end this process, if for anybody.

        Call it often.
        """
        self.read()  # before silence is judged: it may be this process that stood still
        with self.lock:
            now = perf_counter()
            self._tell(self.membership.tick(now))
            return self.membership.overdue(now)

    def say_goodbye(self) -> None:
        """Tell the others that this process has done its part."""
        with self.lock:
            self._tell(self.membership.leave())

    def say_failure(self, culprit: int, sentence: str) -> None:
        """Tell the others that this process ends, by whose fault, and why."""
        with self.lock:
            self._tell(self.membership.fail(culprit, sentence))

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
            self.membership.require_all()
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

    def await_hang_up(self, seconds: float, other: int) -> bool:
        """Wait until a process that is not known to be gone closes its connection; whether any did.

        Reads nothing.

        Args:
            seconds: at most so long.
            other: a descriptor that ends the wait, too, by becoming readable.
        """
        poll = select.poll()
        poll.register(other, select.POLLIN)
        for rank, peer in self.connections.items():
            if rank not in self.membership.gone:
                poll.register(peer.socket, getattr(select, "POLLRDHUP", 0))
        return any(number != other for number, _ in poll.poll(1000 * seconds))

    def flushed(self) -> bool:
        """Whether everything posted is on its way."""
        with self.lock:
            self._send(self.ranks, b"")
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

    def _all_sent(self) -> bool:
        return not any(connection.unsent for connection in self.connections.values())

    # Below here the caller holds the lock.

    def _send(self, ranks: Collection[int], frame: bytes) -> None:
        for rank in () if self._closed else ranks:
            self.connections[rank].send(frame)

    def _tell(self, sends: Sequence[Send]) -> None:
        for ranks, said in sends:
            self._send(ranks, pack(said))

    def _read(self) -> bool:
        """Read what has come and send what waits; whether anything had come."""
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
            if connection.read():
                now = perf_counter()
                self.membership.heard(connection.rank, now)
                while (frame := connection.next_frame()) is not None:
                    self._file(connection.rank, frame, now)
        except ConnectionLost as lost:
            self._selector.unregister(connection.socket)
            self.membership.closed(connection.rank, str(lost), perf_counter())

    def _file(self, rank: int, frame: Frame, now: float) -> None:
        try:
            if frame.channel == 0 and frame.kind in SAID:
                said = SAID[frame.kind].decode(frame.body)
                self._tell(self.membership.received(rank, said, now))
            elif (known := self._handlers.get(frame.channel, {}).get(frame.kind)) is not None:
                decoder, handler = known
                self._inbox.append((handler, rank, decoder.decode(frame.body)))
            elif frame.channel not in self._ended:
                raise ConnectionLost(f"sent an unknown message {frame.kind!r}")
        except msgspec.DecodeError as error:
            raise ConnectionLost(f"sent a message {frame.kind!r} that is none: {error}") from None
