"""A request to stop at a step boundary: made to one process, known to all at the same point."""

from __future__ import annotations


class Stop:
    """What this process knows of a request to stop.

    Attributes:
        requested: of this process.
        agreed: of some process, as of the latest gather; equal everywhere at the same point.
    """

    def __init__(self) -> None:
        self.requested = self.agreed = False

    def request(self) -> None:
        """Ask this process to stop; from any thread."""
        self.requested = True

    def hear(self, requested: bool) -> None:
        """Take in what all processes have just told each other."""
        self.agreed = self.agreed or requested
