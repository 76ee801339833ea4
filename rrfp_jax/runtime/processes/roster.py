"""The processes of a run by number and name."""

from __future__ import annotations

from collections.abc import Sequence


class Roster:
    """Who is in the run.

    Args:
        rank: of this process.
        size: how many there are.

    Attributes:
        stages: of each rank as text, such as "stage 2"; empty until a mesh has been laid out.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.stages: Sequence[str] = [""] * size

    def describe(self, rank: int) -> str:
        """A rank as messages name it: "rank 2 (stage 2)"."""
        return f"rank {rank} ({self.stages[rank]})" if self.stages[rank] else f"rank {rank}"
