"""Which microbatches may be in flight on a stage.

A microbatch is admitted once per stage, at its first forward there, and only if

    held + cost(j) + reserve(j) <= limit,

where reserve(j) is the largest cost of a lower-indexed microbatch not yet admitted here. Its later tasks
are never refused. It is released when its last releasing task is *dispatched*. Without the reserve, stages
that admitted different microbatches can wait for each other for ever: index-ordered accumulation needs the
lowest one everywhere. Here each microbatch costs 1.
"""

from __future__ import annotations


class Admission:
    """Counts the microbatches in flight on one stage. `limit=None` admits everything."""

    def __init__(self, microbatches: int, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: at least one microbatch must be admitted")
        self._limit = limit
        self._admitted = bytearray(microbatches)
        self._lowest = 0  # lowest microbatch not yet admitted
        self.held = 0

    def admits(self, microbatch: int) -> bool:
        """Whether the microbatch's first forward may be dispatched now."""
        if self._limit is None:
            return True
        reserve = 1 if microbatch > self._lowest else 0
        return self.held + 1 + reserve <= self._limit

    def admit(self, microbatch: int) -> None:
        """Account for a microbatch whose first forward is dispatched."""
        self._admitted[microbatch] = 1
        self.held += 1
        while self._lowest < len(self._admitted) and self._admitted[self._lowest]:
            self._lowest += 1

    def release(self) -> None:
        """Account for a microbatch whose last releasing task is dispatched."""
        self.held -= 1
