"""Permutations of any length. They cost no memory, and are the same in every version of every library."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def shuffled(drawn: NDArray[np.uint64], count: int, seed: int) -> NDArray[np.int64]:
    """The `drawn`-th elements of range(count), shuffled anew for every epoch by (seed, epoch).

    Epoch follows upon epoch without a gap: draws 0 .. count - 1 are the first, and so on.
    """
    epoch, index = np.divmod(drawn, np.uint64(count))
    key = mix(mix(np.full(drawn.shape, seed % 2**64, np.uint64)) ^ epoch)
    return permute(index, count, key).astype(np.int64)


def permute(index: NDArray[np.uint64], count: int, key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Where the permutation of range(count) drawn by `key` sends `index`.

    A Feistel network shuffles the cells of a grid with at least `count` of them; what lands on a cell beyond
    is sent on until it does not. So an epoch of any length costs no memory, and its order, unlike that of
    NumPy's generators, is the same in every version.
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
