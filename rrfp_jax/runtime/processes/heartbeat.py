"""Signs of life: this process's for the others, theirs for this one, and rank 0's clock by the way."""

from __future__ import annotations

import select
from time import perf_counter

from rrfp_jax.runtime.processes.clock import PeerClock
from rrfp_jax.runtime.processes.connection import Connection
from rrfp_jax.runtime.processes.frames import Message, pack
from rrfp_jax.runtime.processes.mailbox import Mailbox


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
