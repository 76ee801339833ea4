"""Rows: documents cut into pieces no longer than a row, each in a row of its own or packed with others.

A piece of n predictions reads n tokens and, as labels, the token after each of them. So all tokens of a
document are read, all but the first one are a label once, and the last one is only a label. Lengths here are
in predictions.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, in the order of documents and from their beginnings on; int64[P] each."""

    document: NDArray[np.int64]
    begin: NDArray[np.int64]
    size: NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Which pieces each row holds: those at `order[start[r]:start[r + 1]]`, one behind the other."""

    start: NDArray[np.int64]  # [R + 1]
    order: NDArray[np.int64]  # [P]
    size: NDArray[np.int64]  # [R], predictions

    def pieces(self, row: int) -> NDArray[np.int64]:
        """Indices of its pieces."""
        return self.order[self.start[row] : self.start[row + 1]]


def split(predictions: NDArray[np.int64], longest: int) -> Pieces:
    """Documents of so many predictions (int64[N], 0 for those left out) as pieces of at most `longest`.

    Of a document that is split all pieces but the last are as long as they may be.
    """
    count = -(-predictions // longest)
    document = np.repeat(np.arange(len(predictions)), count)
    begin = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * longest
    return Pieces(document, begin, np.minimum(predictions[document] - begin, longest))


def one_each(sizes: NDArray[np.int64]) -> Rows:
    """A row for every piece."""
    return Rows(np.arange(len(sizes) + 1), np.arange(len(sizes)), sizes)


def packed(sizes: NDArray[np.int64], length: int) -> Rows:
    """Pieces packed into rows of `length`: best-fit decreasing.

    Pieces are taken from the longest on, equal ones by index, and each is put where the least room stays,
    of equal rows into the one that has been so for the shortest time. Such a packing needs at most 11/9 of
    the fewest possible rows, and one more (Johnson, 1973). O(P log length).
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those in by_room, ascending
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if room > size:
            if room - size not in by_room:
                bisect.insort(rooms, room - size)
            by_room.setdefault(room - size, []).append(row)
    start = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    order = np.array([piece for row in rows for piece in row], np.int64)
    return Rows(start, order, np.add.reduceat(sizes[order], start[:-1]))
