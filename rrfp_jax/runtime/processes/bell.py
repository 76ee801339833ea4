"""What the driver sleeps on when nothing can be done."""

from __future__ import annotations

import threading
from typing import Protocol


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
