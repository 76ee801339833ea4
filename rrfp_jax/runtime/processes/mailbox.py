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
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, TypeAlias

from rrfp_jax.errors import PeerLost
from rrfp_jax.runtime.processes.clock import PeerClock
from rrfp_jax.runtime.processes.frames import pack, unpack

FULL_RETRY_SECONDS = 1e-3
"""Pause before a full socket is tried again."""

LOSS_SECONDS = 2.0
"""Data fails to come as soon as its sender dies; that it has, this process may hear a little later."""

Handler: TypeAlias = Callable[..., None]
"""Called as handler(rank, *content)."""


@dataclass(frozen=True)
class Gone:
    """Why a process takes no further part: it `left` in good order, `failed` and said so, or is `lost`."""

    how: Literal["left", "failed", "lost"]
    culprit: int  # the rank whose trouble this is
    sentence: str
    since: float  # perf_counter seconds


class _Peer:
    """The connection to one process."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.lock = threading.Lock()  # main thread and watchdog both send
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.heard = perf_counter()

    def send(self, frame: bytes) -> None:
        with self.lock:
            self.outgoing += frame
            self._flush()

    def flush(self) -> None:
        if self.outgoing:
            with self.lock:
                self._flush()

    def _flush(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # reading says why, after what came before
            self.outgoing.clear()

    def close(self) -> None:
        with self.lock:
            self.socket.close()


class Mailbox:
    """This process's connections to the others of the run.

    Args:
        rank: of this process.
        sockets: connected and authenticated, by rank.

    Attributes:
        gone: who takes no further part; replaced as a whole, so that any thread may look.
        clock: what is known of rank 0's.
        describe: names a rank in messages.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.clock = PeerClock()
        self.gone: Mapping[int, Gone] = {}
        self.describe: Callable[[int], str] = "rank {}".format
        self._peers = {r: _Peer(r, s) for r, s in sorted(sockets.items())}
        self._inbox: deque[tuple[int, list[Any]]] = deque()
        self._handlers: dict[str, Handler] = {}
        self._reading = threading.Lock()  # held by whoever reads, notes who is gone, or closes
        self._closed, self._judged = False, perf_counter()
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._ring_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._ring_end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    @property
    def ranks(self) -> Collection[int]:
        """The other processes."""
        return self._peers.keys()

    def on(self, topic: str, handler: Handler) -> None:
        """Have messages of a topic handled by `handler(rank, *content)`, in the thread that pumps."""
        self._handlers[topic] = handler

    def post(self, rank: int, *message: Any) -> None:
        """Send [topic, ...] to a process; returns at once, also if that process is gone."""
        self._peers[rank].send(pack(*message))

    def post_all(self, *message: Any) -> None:
        """Send [topic, ...] to every other process."""
        frame = pack(*message)
        for peer in self._peers.values():
            peer.send(frame)

    def pump(self) -> None:
        """Hand what has come to its handlers; returns at once. Main thread only."""
        with self._reading:
            self._read()
        while self._inbox:
            rank, message = self._inbox.popleft()
            self._handlers[message[0]](rank, *message[1:])

    def require(self, needed: Collection[int], known: Mapping[int, Gone] | None = None) -> None:
        """Raise for the most telling of these processes that are gone: one that failed, else one lost.

        Args:
            needed: ranks that the caller cannot do without.
            known: who was gone at some earlier moment; None for now. Of a process that left, something may
                still be unread if it was read by the watchdog just now, so look before pumping.

        Raises:
            PeerLost: one of them is gone.
        """
        known = self.gone if known is None else known
        if not known:
            return
        gone = [one for rank, one in sorted(known.items()) if rank in needed]
        for how in ("failed", "lost", "left"):
            for one in gone:
                if one.how == how:
                    left = f"{self.describe(one.culprit)} has ended while this process still needs it"
                    raise PeerLost(left if how == "left" else one.sentence, one.culprit)

    def hear_of_losses(self) -> None:
        """Something between processes has failed, perhaps since one is gone: wait a while to hear of that.

        Raises:
            PeerLost: one is.
        """
        deadline = perf_counter() + LOSS_SECONDS
        while perf_counter() < deadline:
            self.require(self.ranks)
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
        if any(peer.outgoing for peer in self._peers.values()):
            seconds = min(seconds, FULL_RETRY_SECONDS)
        select.select([self._selector], [], [], max(seconds, 0.0))  # type: ignore[list-item]

    def beat(self) -> None:
        """Tell the others that this process lives, and ask rank 0 for its time; from any thread."""
        frame = pack("beat", perf_counter())
        for peer in self._peers.values():
            if peer.rank not in self.gone:
                peer.send(frame)

    def read_if_idle(self) -> None:
        """Read what has come unless another thread is about to; from the watchdog."""
        if self._reading.acquire(blocking=False):
            try:
                news = self._read()
            finally:
                self._reading.release()
            if news:
                self.ring()  # the main thread may just have gone to sleep on what has been taken away here

    def await_hang_up(self, seconds: float, other: int) -> bool:
        """Wait until a process that is not known to be gone closes its connection; whether any did.

        For the watchdog; reads nothing.

        Args:
            seconds: at most so long.
            other: a descriptor whose hanging up ends the wait, too.
        """
        poll = select.poll()
        poll.register(other, 0)
        for rank, peer in self._peers.items():
            if rank not in self.gone:
                poll.register(peer.socket, getattr(select, "POLLRDHUP", 0))
        return any(number != other for number, _ in poll.poll(1000 * seconds))

    def is_cut_off(self) -> bool:
        """Whether all other processes, of several, are lost and not one said why."""
        return 1 < len(self._peers) == sum(one.how == "lost" for one in list(self.gone.values()))

    def judge_silence(self, limit: float) -> None:
        """Give up processes from which nothing has come for `limit` seconds; call often, after reading.

        If this process itself stood still, so may all have (Ctrl-Z): then their silence says nothing yet.
        """
        with self._reading:
            now = perf_counter()
            stood_still, self._judged = now - self._judged > limit / 2, now
            for rank, peer in self._peers.items():
                silence = now - peer.heard
                if stood_still:
                    peer.heard = now
                elif silence > limit:
                    self._lose(rank, f"has not been heard from for {silence:.0f} s: frozen or cut off")

    def flushed(self) -> bool:
        """Whether everything posted is on its way."""
        for peer in self._peers.values():
            peer.flush()
        return not any(peer.outgoing for peer in self._peers.values())

    def close(self) -> None:
        """Close all connections."""
        with self._reading:
            self._closed = True
            self._selector.close()
            self._wake_end.close()
            self._ring_end.close()
            for peer in self._peers.values():
                peer.close()

    def _read(self) -> bool:
        """Read what has come and send on what waits; whether anything had come. Holding `_reading`."""
        if self._closed:
            return False
        found = self._selector.select(0)
        for key, _ in found:
            if key.data is None:
                self._wake_end.recv(4096)
            else:
                self._receive(key.data)
        for peer in self._peers.values():
            peer.flush()
        return bool(found)

    def _receive(self, peer: _Peer) -> None:
        reason = "closed its connection without a word: killed, crashed or cut off"
        try:
            data = peer.socket.recv(2**18)
            peer.incoming += data
            peer.heard = perf_counter()
            while (message := unpack(peer.incoming)) is not None:
                self._file(peer, message)
        except BlockingIOError:
            return
        except ValueError as error:
            data, reason = b"", f"sent {error}"
        except OSError as error:
            data, reason = b"", f"is gone ({error.strerror}): killed, crashed or cut off"
        if not data:
            self._selector.unregister(peer.socket)
            self._lose(peer.rank, reason)

    def _file(self, peer: _Peer, message: list[Any]) -> None:
        match message:
            case ["beat", sent]:
                if self.rank == 0:
                    peer.send(pack("echo", sent, perf_counter()))
            case ["echo", float(sent), float(theirs)]:
                self.clock.sample(sent, theirs, peer.heard)
            case ["goodbye"]:
                self._note(peer.rank, Gone("left", peer.rank, "has ended", perf_counter()))
            case ["failed", int(culprit), str(sentence)]:
                self._note(peer.rank, Gone("failed", culprit, sentence, perf_counter()))
            case _ if message[0] in self._handlers:
                self._inbox.append((peer.rank, message))
            case _:
                raise ValueError(f"an unknown message {message[0]!r}")

    def _lose(self, rank: int, reason: str) -> None:
        self._note(rank, Gone("lost", rank, f"{self.describe(rank)} {reason}", perf_counter()))

    def _note(self, rank: int, gone: Gone) -> None:
        """The first reason stays, except that a process's own word on its failure explains more."""
        known = self.gone.get(rank)
        if known is None or (gone.how == "failed" and known.how != "failed"):
            self.gone = {**self.gone, rank: gone}
