"""Ctrl-C at points where nothing is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: after a program has eaten its
donated inputs and before its outputs are stored, between two stages' updates, or while a thread starts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C is noted, and raised at the end; the value tells whether it came.

    A second Ctrl-C is not held, so that even a hanging program can be left.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False  # KeyboardInterrupt is not raised here, or not by Python's own handler
        return
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


class Why(IntEnum):
    """Why a run is to stop; of several reasons the greatest counts."""

    NOTHING = 0
    ASKED = 1  # by the run's own code
    HANDS_OVER = 2  # to an attempt with more replicas
    SIGTERM = 3
    CTRL_C = 4

    def __str__(self) -> str:
        return {Why.SIGTERM: "SIGTERM", Why.CTRL_C: "Ctrl-C"}.get(self, self.name.lower())


class Stop:
    """What this process knows of a request to stop.

    Attributes:
        requested: of this process.
        agreed: of some process, as of the latest gather; equal everywhere at the same point.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if nothing had been requested; in all processes at the same point."""
        self.requested = self.agreed = Why.NOTHING

    def request(self, why: Why) -> None:
        """Ask this process to stop; from any thread."""
        self.requested = max(self.requested, why)

    def hear(self, requested: int) -> None:
        """Take in what all processes have just told each other."""
        self.agreed = max(self.agreed, Why(requested))


END_SECONDS = 10.0
"""After so long a thread that ends the process is stuck itself, as on a disk that does not answer."""


class Leaving:
    """What is to be done when this process leaves its run, and who may end it.

    Attributes:
        says_goodbye: whether this process is taking its leave of the others, and may wait for them.
    """

    def __init__(self) -> None:
        self.says_goodbye = False
        self._acts: list[Callable[[], None]] = []
        self._ending = threading.Lock()

    def at_last(self, act: Callable[[], None]) -> None:
        """Have something done once this process has left the run in good order, before it ends."""
        self._acts.append(act)

    def act(self) -> None:
        """Do all of that, in order."""
        for act in self._acts:
            act()

    def claim_end(self) -> None:
        """To be called before a thread ends the process: main thread or watchdog, never both at once.

        Returns at once to the first caller. Any other waits here while the process ends, and goes on only
        if it does not.
        """
        self._ending.acquire(timeout=END_SECONDS)
