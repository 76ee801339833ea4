"""Which microbatches may be in flight on a stage.

The rule keeps the stage within its memory, and no stages wait for each other in a circle: docs/memory.md has
the proof. A microbatch is admitted once per stage, at its first forward there, with the cost of all its
chunks, if

    held + cost(j) + reserve(j) <= limit,

where reserve(j) is the largest cost of a lower-indexed microbatch that is not yet admitted here. Its later
tasks are never refused. It is released when its last releasing task is *dispatched*. Without the reserve,
stages that admitted different microbatches can wait for each other for ever, because accumulation in index
order needs the lowest one everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence


class Admission:
    """What the microbatches in flight on one stage cost, and what fits beside them.

    Args:
        costs: of each microbatch, in whatever unit the limit has: 1 each, or bytes.
        limit: on the sum; None admits everything.

    Raises:
        ValueError: a microbatch that costs more than the limit could never run.
    """

    def __init__(self, costs: Sequence[int], limit: int | None) -> None:
        if limit is not None:
            dearest = max(range(len(costs)), key=costs.__getitem__)
            if costs[dearest] > limit:
                raise ValueError(
                    f"limit={limit}: microbatch {dearest} costs {costs[dearest]}: it could never be admitted"
                )
        self._costs = costs
        self._limit = limit
        self._cheapest = min(costs)
        self._admitted = bytearray(len(costs))
        self._lowest = 0  # lowest microbatch not yet admitted
        self._scanned = self._dearest = 0  # the largest cost not admitted below a microbatch
        self.held = 0

    def admits(self, microbatch: int) -> bool:
        """Whether the microbatch's first forward may be dispatched now."""
        if self._limit is None:
            return True
        needed = self.held + self._costs[microbatch]
        if microbatch > self._lowest:
            needed += self._reserve(microbatch)
        return needed <= self._limit

    def refuses_beyond(self, microbatch: int) -> bool:
        """Whether this one, not yet admitted, and every higher one are refused: they must reserve for it."""
        if self._limit is None or self.admits(microbatch):
            return False
        reserve = max(self._costs[microbatch], self._reserve(microbatch))
        return self.held + self._cheapest + reserve > self._limit

    def admit(self, microbatch: int) -> None:
        """Account for a microbatch whose first forward is dispatched."""
        self._admitted[microbatch] = 1
        self.held += self._costs[microbatch]
        if microbatch == self._lowest:
            lowest = self._admitted.find(0, microbatch)
            self._lowest = lowest if lowest >= 0 else len(self._admitted)
        self._scanned, self._dearest = self._lowest, 0

    def release(self, microbatch: int) -> None:
        """Account for a microbatch whose last releasing task is dispatched."""
        self.held -= self._costs[microbatch]

    def _reserve(self, microbatch: int) -> int:
        if microbatch < self._scanned:
            self._scanned, self._dearest = self._lowest, 0
        for j in range(self._scanned, microbatch):
            if not self._admitted[j]:
                self._dearest = max(self._dearest, self._costs[j])
        self._scanned = max(self._scanned, microbatch)
        return self._dearest
