"""Coming events, in order of time and, at equal times, in order of entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, Generic, TypeAlias, TypeVar

Whom = TypeVar("Whom")

Happening: TypeAlias = Callable[[float, Whom, Any], None]
"""What is called with the time, whom it concerns, and what was entered with it."""


class Agenda(Generic[Whom]):
    """A heap of events, which concern devices, or whatever else there is several of."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Happening[Whom], Whom, Any]] = []
        self._entries = 0

    def add(self, at: float, happens: Happening[Whom], whom: Whom, what: Any) -> None:
        """Have `happens(at, whom, what)` called."""
        self._entries += 1
        heappush(self._heap, (at, self._entries, happens, whom, what))

    def __iter__(self) -> Iterator[float]:
        """Go from instant to instant; each is given when all of its events have happened.

        Events added for an instant that has been given make it come again.
        """
        heap = self._heap
        while heap:
            now, _, happens, whom, what = heappop(heap)
            happens(now, whom, what)
            if not heap or heap[0][0] != now:
                yield now
