"""How a process leaves its run: what is done last, by the one thread that ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
