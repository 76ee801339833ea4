"""How a process of several leaves its run in good order, and that it does whatever ends it.

It leaves the coordination service, whose server waits for all processes, and only then says goodbye: so long
the server stays. A process that ends by an error ends as `failure.py` has it instead.
"""

from __future__ import annotations

import atexit
import sys
import threading
from time import sleep
from types import TracebackType

from rrfp_jax.errors import PeerLost, TrainingError
from rrfp_jax.runtime._jax import leave_run
from rrfp_jax.runtime.lifecycle.attendance import Attendance
from rrfp_jax.runtime.lifecycle.failure import FLUSH_SECONDS, fail, flush
from rrfp_jax.runtime.lifecycle.watchdog import Watchdog
from rrfp_jax.runtime.processes.children import children_give_up
from rrfp_jax.runtime.processes.coordinator import Coordinator
from rrfp_jax.runtime.processes.departures import Gone
from rrfp_jax.runtime.processes.mailbox import Goodbye
from rrfp_jax.runtime.processes.world import World


class Farewell:
    """The end of a process of several. Once it is made, the process ends so.

    Args:
        world: the run.
        coordinator: the coordination service, if this process serves it; it ends last, for the others need
            it.
    """

    def __init__(self, world: World, coordinator: Coordinator | None = None) -> None:
        assert world.mailbox is not None and world.heartbeat is not None
        self._world, self._mailbox, self._coordinator = world, world.mailbox, coordinator
        attendance = Attendance(world)
        world.waits.at_limit = attendance.plead
        self._watchdog = Watchdog(
            world.mailbox, world.heartbeat, attendance.attend, world.silence_seconds, self._give_up
        )
        self._done = threading.Event()
        # Started now: from Python 3.12 on no thread can be once the main one has ended.
        self._leaver = threading.Thread(target=self._leave_when_done, name="rrfp-leave", daemon=True)
        self._leaver.start()
        sys.excepthook = self._on_error
        atexit.register(self._say_goodbye)
        children_give_up(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: it is no rank, and others must not take it for a sign of this one's life."""
        sys.excepthook = sys.__excepthook__
        atexit.unregister(self._say_goodbye)
        self._mailbox.let_go()

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(self._world, error)

    def _give_up(self, gone: Gone) -> None:
        fail(self._world, PeerLost(gone.sentence, gone.culprit))

    def _leave_when_done(self) -> None:
        self._done.wait()
        leave_run()

    def _say_goodbye(self) -> None:
        """At Python's end, after the main thread's."""
        self._world.leaving.says_goodbye = True
        self._world.recorder.phase("ended")
        if self._coordinator is not None:
            self._outlive_others()
            if (gone := self._mailbox.departures.in_trouble()) is not None:
                self._give_up(gone)
        self._leave_service()
        self._world.leaving.act()
        self._mailbox.post_all(Goodbye())
        flush(self._mailbox, FLUSH_SECONDS)
        if self._coordinator is not None:
            self._coordinator.close()
        self._watchdog.stop()
        self._mailbox.close()
        self._world.leaving.says_goodbye = False  # exit handlers that were there before follow

    def _outlive_others(self) -> None:
        """Wait until all other processes have ended; one that is silent for too long counts as lost."""
        while len(self._mailbox.departures.gone) < self._world.size - 1:
            self._mailbox.read()
            sleep(0.02)

    def _leave_service(self) -> None:
        """Leave the coordination service, in the thread that was started for it: it may stand still."""
        limit = self._world.silence_seconds
        self._done.set()
        self._leaver.join(min(limit, threading.TIMEOUT_MAX))
        if self._leaver.is_alive():
            fail(
                self._world,
                TrainingError(
                    f"its work is done, but the process with the key-value store, started by the launcher or "
                    f"rank 0, has not answered for {limit:g} s: frozen or cut off"
                ),
            )
