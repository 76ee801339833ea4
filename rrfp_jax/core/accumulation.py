"""The order in which gradients are added. It makes results equal to the bit, whatever the dispatch order.

With `"index"`, a chunk's gradients are added in microbatch order. A backward may run ahead of its turn if a
spare buffer can park its gradient until then. With `"arrival"` each gradient is added as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from rrfp_jax.core.tasks import CHARGES, Task

Accumulation: TypeAlias = Literal["index", "arrival"]

SPARE_GRADIENTS = 2
"""Spare buffers unless told otherwise: the fewest that cost at most 2 % in the median where transfers are
exponential with a mean of up to a forward (`python -m benchmarks.studies.reordering`)."""


class Accumulator:
    """Turn and parked gradients of one stage; the spare buffers are shared by its chunks.

    Attributes:
        spare: how many gradients may wait for their turn at once.
        parked: how many do.
    """

    def __init__(self, chunks: int, mode: Accumulation, spare: int) -> None:
        if mode not in ("index", "arrival"):
            raise ValueError(f"accumulation={mode!r}: choose 'index' or 'arrival'")
        if spare < 0:
            raise ValueError(f"spare_gradients={spare}: must not be negative")
        self.spare = spare
        self.parked = 0
        self._ordered = mode == "index"
        self._turn = [0] * chunks
        self._parked: list[set[int]] = [set() for _ in range(chunks)]

    def accepts(self, chunk: int, microbatch: int) -> bool:
        """Whether there is somewhere to put the gradient if this backward runs now.

        The turn is at most the lowest ready microbatch; so if that one is refused, no higher one is in turn,
        and all are refused.
        """
        return not self._ordered or microbatch == self._turn[chunk] or self.parked < self.spare

    def add(self, chunk: int, microbatch: int) -> tuple[int, ...]:
        """Take in a gradient; the microbatches of this chunk to add now, in order (none if it was parked)."""
        if not self._ordered:
            return (microbatch,)
        turn, parked = self._turn[chunk], self._parked[chunk]
        if microbatch != turn:
            parked.add(microbatch)
            self.parked += 1
            return ()
        due = [microbatch]
        while (turn := turn + 1) in parked:
            parked.remove(turn)
            self.parked -= 1
            due.append(turn)
        self._turn[chunk] = turn
        return tuple(due)


def most_parked(order: Iterable[Task], chunks: int) -> int:
    """How many gradients a stage has parked at once that runs its tasks in this order, added by index."""
    tasks = list(order)
    accumulator, most = Accumulator(chunks, "index", len(tasks)), 0
    for kind, chunk, microbatch in tasks:
        if CHARGES[kind] < 0:
            accumulator.add(chunk, microbatch)
            most = max(most, accumulator.parked)
    return most
