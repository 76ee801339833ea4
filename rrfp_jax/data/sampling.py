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

import bisect
import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.contract import Microbatch
from rrfp_jax.errors import UsageError

Split: TypeAlias = Literal["train", "validation"]

Order: TypeAlias = Literal["drawn", "longest", "shortest", "zigzag"]
"""As drawn, by falling or rising cost, or the dearest and the cheapest of those left in turn."""

Drawn: TypeAlias = tuple[int, NDArray[np.int64]]
"""A microbatch: its bucket, and positions among the bucket's rows or `EMPTY`."""

EMPTY = -1
"""A row without any token."""


def planned(
    microbatch: Microbatch, fingerprint: int, fields: Collection[str], known: Collection[str], what: str
) -> list[int]:
    """The source of a microbatch; `UsageError` for fields that are not known, or if other data planned it."""
    if unknown := sorted(set(fields) - set(known)):
        raise UsageError(f"fields {unknown}: {what} have none of these; read from {list(known)}")
    source: list[int]
    planned_from, *source = microbatch.source
    if planned_from != fingerprint:
        raise UsageError(
            f"fingerprint {planned_from:#x}: the microbatch was planned from other {what} than these "
            f"({fingerprint:#x}); give every process the same {what}"
        )
    return source


class Draw(NamedTuple):
    """How many rows each bucket has, how many of them a microbatch takes, and the seed of their order."""

    rows: tuple[int, ...]
    taken: tuple[int, ...]
    microbatches: int  # of a step
    seed: int

    @property
    def steps(self) -> int:
        """Steps for the first epoch's microbatches, at least one; the last perhaps in part.

        Rows of a bucket that fill no whole microbatch in that epoch come after it.
        """
        return max(1, -(-self._before(1) // self.microbatches))

    @property
    def validation_steps(self) -> int:
        """Steps of a pass over all rows in order."""
        return -(-sum(self._in_a_pass) // self.microbatches)

    def training_step(self, step: int) -> list[Drawn]:
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

    def validation_step(self, step: int) -> list[Drawn]:
        """The microbatches of a step of a pass; after the last the pass begins again."""
        ends = np.cumsum(self._in_a_pass)
        drawn = []
        first = step % self.validation_steps * self.microbatches
        for number in range(first, first + self.microbatches):
            of = number if number < ends[-1] else 0  # beyond the last one all rows are empty
            bucket = int(np.searchsorted(ends, of, side="right"))
            turn = number - int(ends[bucket]) + self._in_a_pass[bucket]
            position = turn * self.taken[bucket] + np.arange(self.taken[bucket])
            drawn.append((bucket, np.where(position < self.rows[bucket], position, EMPTY)))
        return drawn

    @property
    def _in_a_pass(self) -> Sequence[int]:
        """Microbatches of each bucket in a pass."""
        return [-(-rows // taken) for rows, taken in zip(self.rows, self.taken, strict=True)]

    def _places(self, epoch: int, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Buckets of microbatches of one epoch of the endless sequence, and turns in the buckets' streams."""
        before = self._completed(epoch)
        counts = self._completed(epoch + 1) - before
        drawn = epoch * counts.sum() + numbers - before.sum()
        place = shuffled(drawn.astype(np.uint64), int(counts.sum()), self._seed(0))
        ends = np.cumsum(counts)
        bucket = np.searchsorted(ends, place, side="right")
        return bucket, place - (ends - counts - before)[bucket]

    def _completed(self, epoch: int) -> NDArray[np.int64]:
        """How many microbatches of each bucket are completed before an epoch begins."""
        completed: NDArray[np.int64] = epoch * np.array(self.rows) // np.array(self.taken)
        return completed

    def _before(self, epoch: int) -> int:
        return int(self._completed(epoch).sum())

    def _epoch(self, number: int) -> int:
        """The epoch in which a microbatch of the endless sequence is completed."""
        fastest = max(rows / taken for rows, taken in zip(self.rows, self.taken, strict=True))
        beyond = int((number + 1) / fastest) + 2  # before it that bucket alone has completed as many
        return bisect.bisect_right(range(beyond), number, key=self._before) - 1

    def _seed(self, stream: int) -> int:
        """A seed of the order of microbatches (0) or of a bucket's rows (1 and up): all different."""
        return self.seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03


def check_sampling(split: Split, validation_share: float, order: Order = "drawn") -> None:
    """Refuse a split or an order that there is not, or a share that leaves one split empty (`UsageError`)."""
    if split not in ("train", "validation"):
        raise UsageError(f"split={split!r}: no such split; give 'train' or 'validation'")
    if not 0 < validation_share < 1:
        raise UsageError(f"validation_share={validation_share}: one split would be empty; give 0 < share < 1")
    if order not in (orders := get_args(Order)):
        raise UsageError(f"order={order!r}: microbatches come in one of the orders {', '.join(orders)}")


def check_counts(nothing: str, **counts: int | None) -> None:
    """Refuse counts below 1, with which a step would hold nothing; raises UsageError."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{name}={count}: a step would hold {nothing}; give {name} >= 1")


# Balance.


def even_out(costs: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """Deal N = bins x k items into bins of k each so that the bins' costs are about equal; int64[bins, k].

    From the dearest on, each item goes to the cheapest bin that has room (longest processing time first);
    ties by index. Items within a bin are in ascending order.
    """
    room = len(costs) // bins
    dealt: list[list[int]] = [[] for _ in range(bins)]
    total = [0.0] * bins
    for item in np.argsort(-costs, kind="stable").tolist():
        to = min((b for b in range(bins) if len(dealt[b]) < room), key=lambda b: total[b])
        dealt[to].append(item)
        total[to] += float(costs[item])
    return np.array([sorted(items) for items in dealt], np.int64)


def ordered(costs: Sequence[float], order: Order) -> list[int]:
    """Indices of a step's microbatches in the order asked for; ties as drawn."""
    drawn = range(len(costs))
    falling = sorted(drawn, key=lambda j: -costs[j])
    return {
        "drawn": list(drawn),
        "longest": falling,
        "shortest": sorted(drawn, key=lambda j: costs[j]),
        "zigzag": [falling[i // 2] if i % 2 == 0 else falling[-1 - i // 2] for i in drawn],
    }[order]


# Permutations of any length: they cost no memory, and are the same in every version of every library.


def shuffled(drawn: NDArray[np.uint64], count: int, seed: int) -> NDArray[np.int64]:
    """The `drawn`-th elements of range(count), shuffled anew for every epoch by (seed, epoch).

    Epochs follow without a gap: draws 0 .. count - 1 are the first, and so on.
    """
    epoch, index = np.divmod(drawn, np.uint64(count))
    key = mix(mix(np.full(drawn.shape, seed % 2**64, np.uint64)) ^ epoch)
    return permute(index, count, key).astype(np.int64)


def permute(index: NDArray[np.uint64], count: int, key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The image of `index` under the permutation of range(count) that `key` draws.

    A Feistel network shuffles the cells of a grid with at least `count` of them; what lands on a cell beyond
    is sent on until it does not.
    """
    rows = np.uint64(math.isqrt(count - 1) + 1)
    columns = np.uint64(-(-count // int(rows)))

    def shuffle(cell: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row, column = np.divmod(cell, columns)
        for turn in np.arange(0, 8, 2, dtype=np.uint64):
            row = (row + mix(mix(key + turn) ^ column) % rows) % rows
            column = (column + mix(mix(key + turn + np.uint64(1)) ^ row) % columns) % columns
        return row * columns + column

    index = shuffle(index)
    while (beyond := index >= count).any():
        index = np.where(beyond, shuffle(index), index)
    return index


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step: 64 bits in, 64 well-stirred bits out."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
