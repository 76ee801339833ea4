"""The connection to one process: a socket that never blocks, frames out and frames in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from time import perf_counter

from rrfp_jax.runtime.processes.frames import Frame, unpack

READ_AT_ONCE = 2**18  # bytes


class ConnectionLost(Exception):
    """The other end is gone, or sent nonsense; the message goes on after its name."""


class Connection:
    """The connection to one process. One thread at a time: see `Mailbox`.

    Args:
        rank: of that process.
        connected: to it.

    Attributes:
        unsent: what the socket would not take yet.
        heard: when something came last (s, `perf_counter`).
    """

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank, self.socket = rank, connected
        self.unsent, self._unread = bytearray(), bytearray()
        self.heard = perf_counter()
        connected.setblocking(False)

    def send(self, frame: bytes) -> None:
        """Send a frame behind those before; returns at once, also if the other end is gone."""
        self.unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send on what waits, as much as the socket takes."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # reading says why, after what came before
            self.unsent.clear()

    def receive(self) -> Iterator[Frame]:
        """What has come, in order; returns at once.

        Raises:
            ConnectionLost: nothing more can come.
        """
        try:
            data = self.socket.recv(READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(f"is gone ({error.strerror}): killed, crashed or cut off") from None
        if not data:
            raise ConnectionLost("closed its connection without a word: killed, crashed or cut off")
        self._unread += data
        self.heard = perf_counter()
        try:
            while (frame := unpack(self._unread)) is not None:
                yield frame
        except ValueError as error:
            raise ConnectionLost(f"sent {error}") from None
