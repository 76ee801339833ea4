"""A thread that keeps up the heartbeat, notices who is gone, and ends a process that is stuck then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

from rrfp_jax.runtime.blackbox import BlackBox
from rrfp_jax.runtime.mailbox import Gone, Mailbox

TICK_SECONDS = 0.5

GRACE_SECONDS = 4.0
"""How long the main thread may take to notice by itself that a process is gone."""


class Watchdog:
    """Lives from joining a run to leaving it, whatever the main thread does: compile, load data, wait.

    Args:
        mailbox: read while the main thread does not.
        box: gets a heartbeat, too.
        silence_seconds: a process from which nothing has come for so long is given up.
        give_up: called in this thread when one is gone and the main thread has not noticed; must not return.
        host: the rank at whose loss this process is aborted by JAX, so that it is given up at once.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        box: BlackBox,
        silence_seconds: float,
        give_up: Callable[[Gone], None],
        host: int | None = None,
    ) -> None:
        self.silence_seconds = silence_seconds
        self._mailbox, self._box, self._give_up, self._host = mailbox, box, give_up, host
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rrfp-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._pause():
            self._mailbox.beat()
            self._box.beat()
            self._mailbox.read_if_idle()  # before silence is judged: it may be this process that stood still
            self._mailbox.judge_silence(self.silence_seconds)
            now = perf_counter()
            for rank, gone in list(self._mailbox.gone.items()):
                grace = 0.0 if rank == self._host and gone.how == "lost" else GRACE_SECONDS
                if gone.how != "left" and now - gone.since >= grace:
                    self._give_up(gone)

    def _pause(self) -> bool:
        """Until the next tick, or until the host is lost; whether this is the end."""
        if self._host is None or self._host in self._mailbox.gone:
            return self._stop.wait(TICK_SECONDS)
        self._mailbox.await_hang_up(self._host, TICK_SECONDS)
        return self._stop.is_set()
