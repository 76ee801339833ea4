"""A request to stop at a step boundary: made to one process, known to all at the same point."""

from __future__ import annotations

from enum import IntEnum


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
