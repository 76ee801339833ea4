"""Control messages between the processes of a run: one socket per pair, small frames, nothing blocks.

A frame is four bytes of length, then [kind, channel, [field, ...]] in msgpack. A kind of message is a class:
its fields with their types are all that has to be said of it. What comes with other fields is refused where
it is read, before anybody acts on it.

Messages from one process arrive in the order in which they were posted. The driver reads them when it runs or
sleeps, else the watchdog does. What was read waits in an inbox until the main thread pumps, so handlers run
in one thread only. What processes say of themselves goes to `Membership` as soon as it is read.
"""

from __future__ import annotations

import fcntl
import select
import selectors
import socket
import termios
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from rrfp_jax.runtime.run.links import Signs
from rrfp_jax.runtime.run.membership import Failed, Gone, Goodbye, Membership, Said, Send

LARGEST_FRAME = 2**20
"""Bytes; control messages are small, so a longer one is an error or an attack."""

HEADER = 4
READ_AT_ONCE = 2**18  # bytes

FULL_RETRY_SECONDS = 1e-3
"""Pause before a full socket is tried again."""

QUIET_SECONDS = 1.5
"""If nothing has come from a peer for so long, its link may be dead: connections there try again often."""

LONGEST_SILENCE = 60.0  # seconds, where a debugger has no limit on silence

SELECTED = 1024
"""Descriptors below this number fit into the sets of `select`."""

LOSS_SECONDS = 2.0
"""Data fails to come as soon as its sender dies; that it has, this process may hear a little later."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message between processes; every kind is a subclass, and goes by its name."""


class Frame(NamedTuple):
    """A message that has come and not been decoded yet."""

    kind: str
    channel: int
    body: msgspec.Raw


def _plain(value: Any) -> Any:
    """NumPy's scalars are plain data, too."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain data")


M = TypeVar("M", bound=Message)
Decoder = msgspec.msgpack.Decoder
encoded = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""Plain data of any size, as bytes."""

_frames = Decoder(Frame)


def pack(message: Message | Said, channel: int = 0) -> bytes:
    """A message as a frame; ValueError if it is larger than a frame may be."""
    kind = type(message).__name__
    body = encoded((kind, channel, message))
    if len(body) > LARGEST_FRAME:
        raise ValueError(f"a message {kind} of {len(body)} bytes; a frame holds {LARGEST_FRAME}")
    return len(body).to_bytes(HEADER, "big") + body


def unpack(buffer: bytearray) -> Frame | None:
    """Take the first frame off a buffer; None if it is not there in full, ValueError for no message."""
    if len(buffer) < HEADER:
        return None
    end = HEADER + int.from_bytes(buffer[:HEADER], "big")
    if end - HEADER > LARGEST_FRAME:
        raise ValueError(f"a frame of {end - HEADER} bytes; {LARGEST_FRAME} are allowed")
    if len(buffer) < end:
        return None
    try:
        frame = _frames.decode(buffer[HEADER:end])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"a frame that is no message: {error}") from None
    del buffer[:end]
    return frame


def pieces(value: Any) -> list[bytes]:
    """Plain data of any size as pieces that fit into frames."""
    body = encoded(value)
    return [body[at : at + LARGEST_FRAME // 2] for at in range(0, len(body), LARGEST_FRAME // 2)]


def whole(parts: Sequence[bytes]) -> Any:
    """The data that `pieces` took apart."""
    return msgspec.msgpack.decode(b"".join(parts))


class Connection:
    """The connection to one process. One thread at a time: see `Mailbox`."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank, self.socket = rank, connected
        self.unsent, self.unread = bytearray(), bytearray()
        connected.setblocking(False)

    def flush(self) -> bool:
        """Send what waits, as much as the socket takes, at once; whether some still waits."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # reading says why, after what came before
            self.unsent.clear()
        return bool(self.unsent)

    @property
    def delivered(self) -> bool:
        """Whether everything has reached the other machine, or nothing more can."""
        with suppress(OSError):
            return not self.unsent and not any(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))
        return not self.unsent

    def read(self) -> bool:
        """Read what has come; returns at once. Whether anything had; EOFError says that nothing more can."""
        try:
            data = self.socket.recv(READ_AT_ONCE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise EOFError(f"is gone ({error.strerror}): killed, crashed or cut off") from None
        if not data:
            raise EOFError("closed its connection without a message: killed, crashed or cut off")
        self.unread += data
        return True


class Mailbox:
    """This process's connections to the others, authenticated; whoever reads or sends holds `lock`."""

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        silence: float = inf,
        signs: Signs | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        self._signs = signs
        self.connections = {r: Connection(r, s) for r, s in sorted(sockets.items())}
        self.ranks: Collection[int] = self.connections.keys()
        self.membership = Membership(rank, self.ranks, perf_counter(), silence, nodes)
        self._full: set[Connection] = set()  # that had not taken all when last tried
        self.lock = threading.Lock()
        self._inbox: deque[tuple[Callable[[int, Any], None], int, Any]] = deque()
        # By channel and name; what processes say of themselves has no handler.
        self._handlers: dict[int, dict[str, tuple[Decoder[Any], Callable[[int, Any], None] | None]]] = {
            0: {kind.__name__: (Decoder(kind), None) for kind in get_args(Said)}
        }
        self._ended: set[int] = set()  # channels
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._ring_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._ring_end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        for connection in self.connections.values():
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def on(self, kind: type[M], handler: Callable[[int, M], None], channel: int = 0) -> None:
        """Have messages of a kind handled by `handler(rank, message)`, in the thread that pumps."""
        known = self._handlers.setdefault(channel, {})
        if kind.__name__ in known:
            raise ValueError(f"messages {kind.__name__!r} on channel {channel} have a handler already")
        known[kind.__name__] = Decoder(kind), handler

    def off(self, channel: int) -> None:
        """Let go of a channel's handlers for good; what still comes there is dropped. From any thread."""
        self._ended.add(channel)  # first: a message must find one or the other
        self._handlers.pop(channel, None)

    def post(self, rank: int, message: Message | Said, channel: int = 0) -> None:
        """Send a message to a process; returns at once, also if that process is gone."""
        frame = pack(message, channel)  # without the lock, as it may be long
        with self.lock:
            self._send([rank], frame)

    def post_all(self, message: Message, channel: int = 0) -> None:
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
        """Read, judge who is silent, and show a sign of life, often; for whom to end this process, if any."""
        self.read()  # before silence is judged: it may be this process that stood still
        with self.lock:
            now = perf_counter()
            for rank in self._signs.heard() if self._signs and not self._closed else ():
                self.membership.heard(rank, now)
            self._tell(sends := self.membership.tick(now))
            if self._signs and sends and not self._closed:
                self._signs.show()
                if self.membership.quietest(now) > QUIET_SECONDS:
                    self._signs.retry_often()
            return self.membership.overdue(now)

    def end(self, word: Goodbye | Failed) -> None:
        """Tell the others that this process has done its part, or ends, by whose fault, and why."""
        with self.lock:
            self._tell(self.membership.end(word))

    def call_soon(self, handler: Callable[[int, Any], None], number: int, what: Any) -> None:
        """Have the thread that pumps call `handler(number, what)`; from any thread."""
        self._inbox.append((handler, number, what))
        self.ring()

    def hear_of_losses(self) -> None:
        """Something between processes has failed: wait a while to hear of one gone, and raise for it.

        Data may fail to pass while its other end is silent, but not yet given up: that is waited for.
        """
        begun, longest = perf_counter(), LOSS_SECONDS + min(self.membership.silence, LONGEST_SILENCE)
        while (waited := (now := perf_counter()) - begun) < LOSS_SECONDS or (
            waited < longest and self.membership.in_doubt(now, QUIET_SECONDS)
        ):
            self.membership.require_all()
            self.sleep(0.1)
            self.pump()
        self.membership.require_all()

    def ring(self) -> None:
        """Wake whoever sleeps; from any thread."""
        with suppress(OSError):  # it holds enough rings already, or is closed
            self._ring_end.send(b"\0")

    def sleep(self, seconds: float) -> None:
        """Sleep until a ring or a message comes, at most so long.

        `select` on the selector itself, because epoll rounds its timeout up to milliseconds; it takes low
        numbers of descriptors only.
        """
        if self._full:
            seconds = min(seconds, FULL_RETRY_SECONDS)
        if self._selector.fileno() < SELECTED:
            select.select([self._selector], [], [], max(seconds, 0.0))  # type: ignore[list-item]
        else:
            self._selector.select(max(seconds, 0.0))

    def await_hang_up(self, seconds: float, other: int) -> bool:
        """Wait until a process closes its connection that was not gone, or `other` is readable."""
        poll = select.poll()
        poll.register(other, select.POLLIN)
        for rank, peer in self.connections.items():
            if rank not in self.membership.gone:
                poll.register(peer.socket, getattr(select, "POLLRDHUP", 0))
        return any(number != other for number, _ in poll.poll(1000 * seconds))

    def flushed(self) -> bool:
        """Whether everything posted is on its way."""
        with self.lock:
            self._flush()
            return not self._full

    def delivered(self) -> bool:
        """Whether everything posted has reached the machines of all that are not gone."""
        there = [one for rank, one in self.connections.items() if rank not in self.membership.gone]
        return self.flushed() and all(one.delivered for one in there)

    def close(self) -> None:
        with self.lock:
            self.let_go()

    def let_go(self) -> None:
        """Do so without the lock; in a forked child, where some other thread may hold it for ever."""
        self._closed = True
        self._selector.close()
        if self._signs:
            self._signs.close()
        for each in (self._wake_end, self._ring_end, *(one.socket for one in self.connections.values())):
            each.close()

    # Below here the caller holds the lock.

    def _send(self, ranks: Collection[int], frame: bytes) -> None:
        for rank in () if self._closed else ranks:
            connection = self.connections[rank]
            connection.unsent += frame
            if connection.flush():
                self._full.add(connection)

    def _flush(self) -> None:
        self._full = {connection for connection in self._full if connection.flush()}

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
        self._flush()
        return bool(found)

    def _receive(self, connection: Connection) -> None:
        try:
            if connection.read():
                now = perf_counter()
                self.membership.heard(connection.rank, now)
                while (frame := unpack(connection.unread)) is not None:
                    self._file(connection.rank, frame, now)
        except (EOFError, ValueError) as error:
            reason = f"sent {error}" if isinstance(error, ValueError) else str(error)
            self._selector.unregister(connection.socket)
            self.membership.closed(connection.rank, reason, perf_counter())

    def _file(self, rank: int, frame: Frame, now: float) -> None:
        if (known := self._handlers.get(frame.channel, {}).get(frame.kind)) is None:
            if frame.channel in self._ended:
                return
            raise ValueError(f"an unknown message {frame.kind!r}")
        decoder, handler = known
        try:
            message = decoder.decode(frame.body)
        except msgspec.DecodeError as error:
            raise ValueError(f"a message {frame.kind!r} that is none: {error}") from None
        if handler is None:
            self._tell(self.membership.received(rank, message, now))
        else:
            self._inbox.append((handler, rank, message))
