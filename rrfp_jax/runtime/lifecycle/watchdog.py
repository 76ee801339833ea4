"""A thread that sends heartbeats and notices who is gone. Then it ends this process if that is stuck."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import perf_counter, sleep

from rrfp_jax.runtime.processes.departures import Gone
from rrfp_jax.runtime.processes.heartbeat import Heartbeat
from rrfp_jax.runtime.processes.mailbox import Mailbox

TICK_SECONDS = 0.5

GRACE_SECONDS = 4.0
"""How long the main thread may take to notice by itself that a process is gone."""

HANG_UP_SECONDS = 0.01
"""Pause before a connection that was closed is read again."""


class Watchdog:
    """Lives from joining a run to leaving it, whatever the main thread does: compile, load data, wait.

    Args:
        mailbox: read while the main thread does not.
        heartbeat: kept up.
        attend: called at every tick, for those who look at this process from outside.
        silence_seconds: a process from which nothing has come for so long is given up.
        give_up: called in this thread when one is gone and the main thread has not noticed; must not return.

    JAX aborts a process that loses the coordination service, as does one that is cut off from everybody: then
    the main thread is not waited for.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        heartbeat: Heartbeat,
        attend: Callable[[], None],
        silence_seconds: float,
        give_up: Callable[[Gone], None],
    ) -> None:
        self.silence_seconds = silence_seconds
        self._mailbox, self._heartbeat = mailbox, heartbeat
        self._attend, self._give_up = attend, give_up
        self._stop_end, self._stopper = os.pipe()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rrfp-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. From another one, once."""
        self._stopped = True
        os.write(self._stopper, b"\0")
        self._thread.join()
        os.close(self._stopper)
        os.close(self._stop_end)

    def _run(self) -> None:
        while not self._stopped:
            self._pause()
            self._heartbeat.beat()
            self._attend()
            self._mailbox.read()  # before silence is judged: it may be this process that stood still
            self._heartbeat.judge_silence(self.silence_seconds)
            now = perf_counter()
            for gone in list(self._mailbox.departures.gone.values()):
                if gone.how != "left" and (
                    self._mailbox.departures.is_cut_off() or now - gone.since > GRACE_SECONDS
                ):
                    self._give_up(gone)

    def _pause(self) -> None:
        """Until the next tick, or news of a connection that was closed."""
        known = len(self._mailbox.departures.gone)
        if self._heartbeat.await_hang_up(TICK_SECONDS, self._stop_end):
            self._mailbox.read()
            if (
                len(self._mailbox.departures.gone) == known
            ):  # the main thread reads just now, or there is more to come
                sleep(HANG_UP_SECONDS)
