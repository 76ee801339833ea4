"""The order in which gradients are added, which makes results equal to the bit whatever the dispatch order.

With `"index"`, a chunk's gradients are added in microbatch order. A backward may run ahead of its turn if a
spare buffer can park its gradient until then. With `"arrival"` each gradient is added as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

Accumulation: TypeAlias = Literal["index", "arrival"]


class Accumulator:
    """Turn and parked gradients of one stage; the spare buffers are shared by its chunks."""

    def __init__(self, chunks: int, mode: Accumulation, spare: int) -> None:
        if mode not in ("index", "arrival"):
            raise ValueError(f"accumulation={mode!r}: choose 'index' or 'arrival'")
        if spare < 0:
            raise ValueError(f"spare_gradients={spare}: must not be negative")
        self._ordered = mode == "index"
        self._spare = spare
        self._turn = [0] * chunks
        self._parked: list[set[int]] = [set() for _ in range(chunks)]

    @property
    def parked(self) -> int:
        """How many gradients wait for their turn."""
        return sum(map(len, self._parked))

    @property
    def spare(self) -> int:
        """How many gradients may wait at once."""
        return self._spare

    def accepts(self, chunk: int, microbatch: int) -> bool:
        """Whether there is somewhere to put the gradient if this backward runs now."""
        return not self._ordered or microbatch == self._turn[chunk] or self.parked < self._spare

    def add(self, chunk: int, microbatch: int) -> Sequence[int]:
        """Take in a gradient; the microbatches to add now, in order (none if it was parked)."""
        if not self._ordered:
            return (microbatch,)
        parked = self._parked[chunk]
        parked.add(microbatch)
        first = turn = self._turn[chunk]
        while turn in parked:
            parked.remove(turn)
            turn += 1
        self._turn[chunk] = turn
        return range(first, turn)
