"""What will happen when, in order of time and, at equal times, of entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, TypeAlias

from rrfp_jax.sim.device import Device

Happening: TypeAlias = Callable[[float, Device, Any], None]
"""What is called with the time, the device it concerns, and what was entered with it."""


class Agenda:
    """A heap of events."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Happening, Device, Any]] = []
        self._entries = 0

    def add(self, at: float, happens: Happening, device: Device, what: Any) -> None:
        """Have `happens(at, device, what)` called."""
        self._entries += 1
        heappush(self._heap, (at, self._entries, happens, device, what))

    def __iter__(self) -> Iterator[float]:
        """Go from instant to instant; each is given when all of its events have happened.

        Events added for an instant that has been given make it come again.
        """
        heap = self._heap
        while heap:
            now, _, happens, device, what = heappop(heap)
            happens(now, device, what)
            if not heap or heap[0][0] != now:
                yield now
