"""The slots of a slab: which are free, and how large each is."""

from __future__ import annotations

from collections.abc import Sequence


class Slots:
    """Slots are numbered; each may grow while it is free.

    Args:
        sizes: of each slot at the beginning, in bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._free = list(range(len(sizes)))

    @property
    def free(self) -> Sequence[int]:
        """Those that nobody has, by number."""
        return self._free

    def suited(self, size: int) -> int:
        """The smallest free slot that holds so many bytes, else the largest free one; some must be free."""
        large = [slot for slot in self._free if self.sizes[slot] >= size]
        return min(large or self._free, key=lambda slot: self.sizes[slot] if large else -self.sizes[slot])

    def take(self, slot: int, size: int = 0) -> bool:
        """Take a free slot; whether it must grow, to so many bytes."""
        self._free.remove(slot)
        grows = self.sizes[slot] < size
        self.sizes[slot] = max(self.sizes[slot], size)
        return grows

    def give_back(self, slot: int) -> None:
        """Nobody writes to it or reads from it any more."""
        self._free.append(slot)
        self._free.sort()
