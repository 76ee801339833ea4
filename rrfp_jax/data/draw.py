"""Which rows the microbatches of a step hold: a function of the step's number alone.

Every bucket has an endless stream of its rows: all of them shuffled by (seed, epoch), epoch after epoch
without a gap. A microbatch takes the next rows of its bucket's stream. So no microbatch has an empty row, and
every row is drawn once before any row of its bucket is drawn again. Epoch e has as many microbatches of
bucket b as are completed in it, floor((e + 1) n / r) - floor(e n / r) for n rows taken r at a time, in an
order shuffled by (seed, epoch) too. Steps go on over the ends of epochs.

In a pass for validation each bucket's rows come in order. Its last microbatch, and the last step, are filled
up with empty rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.shuffle import shuffled

EMPTY = -1
"""A row without any token."""

Drawn: TypeAlias = tuple[int, NDArray[np.int64]]
"""A microbatch: its bucket, and positions among the bucket's rows or `EMPTY`."""


@dataclass(frozen=True)
class Draw:
    """How many rows there are and how many are taken.

    Args:
        rows: by bucket, how many there are.
        taken: by bucket, how many of them a microbatch has.
        microbatches: of a step.
        seed: of the order.
    """

    rows: tuple[int, ...]
    taken: tuple[int, ...]
    microbatches: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps that the first epoch fills, the last perhaps in part."""
        return max(1, -(-self._before(1) // self.microbatches))

    @property
    def steps_of_a_pass(self) -> int:
        """Steps of a pass over all rows in order."""
        return -(-sum(self._counts_of_a_pass) // self.microbatches)

    def training(self, step: int) -> list[Drawn]:
        """The microbatches of a training step."""
        numbers = np.arange(step * self.microbatches, (step + 1) * self.microbatches)
        epochs = np.array([self._epoch(int(number)) for number in numbers])
        places = [self._places(epoch, numbers[epochs == epoch]) for epoch in np.unique(epochs).tolist()]
        buckets, turns = (np.concatenate(parts) for parts in zip(*places, strict=True))
        drawn: list[Drawn] = [None] * len(numbers)  # type: ignore[list-item]
        for bucket in np.unique(buckets).tolist():
            own, taken = np.flatnonzero(buckets == bucket), self.taken[bucket]
            stream = turns[own][:, None] * taken + np.arange(taken)
            rows = shuffled(stream.astype(np.uint64), self.rows[bucket], self._seed(bucket + 1))
            for j, row in zip(own.tolist(), rows, strict=True):
                drawn[j] = (bucket, row)
        return drawn

    def passing(self, step: int) -> list[Drawn]:
        """The microbatches of a step of a pass; after the last the pass begins again."""
        ends = np.cumsum(self._counts_of_a_pass)
        drawn = []
        first = step % self.steps_of_a_pass * self.microbatches
        for number in range(first, first + self.microbatches):
            if number >= ends[-1]:
                bucket = next(b for b, rows in enumerate(self.rows) if rows)
                drawn.append((bucket, np.full(self.taken[bucket], EMPTY)))
                continue
            bucket = int(np.searchsorted(ends, number, side="right"))
            turn = number - int(ends[bucket]) + self._counts_of_a_pass[bucket]
            position = turn * self.taken[bucket] + np.arange(self.taken[bucket])
            drawn.append((bucket, np.where(position < self.rows[bucket], position, EMPTY)))
        return drawn

    @property
    def _counts_of_a_pass(self) -> Sequence[int]:
        return [-(-rows // taken) for rows, taken in zip(self.rows, self.taken, strict=True)]

    def _places(self, epoch: int, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of microbatches of one epoch in the endless sequence: their buckets, and turns in its stream."""
        before = self._completed(epoch)
        counts = self._completed(epoch + 1) - before
        drawn = epoch * counts.sum() + numbers - before.sum()
        place = shuffled(drawn.astype(np.uint64), int(counts.sum()), self._seed(0))
        ends = np.cumsum(counts)
        bucket = np.searchsorted(ends, place, side="right")
        return bucket, place - (ends - counts - before)[bucket]

    def _completed(self, epoch: int) -> NDArray[np.int64]:
        """By bucket, how many microbatches are completed before an epoch begins."""
        completed: NDArray[np.int64] = epoch * np.array(self.rows) // np.array(self.taken)
        return completed

    def _before(self, epoch: int) -> int:
        return int(self._completed(epoch).sum())

    def _epoch(self, number: int) -> int:
        """The epoch in which a microbatch of the endless sequence is completed."""
        low, high = 0, 1
        while self._before(high) <= number:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._before(middle) <= number else (low, middle)
        return low

    def _seed(self, stream: int) -> int:
        """Of the order of microbatches (0) or of a bucket's rows (1 and up): all different."""
        return self.seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03
