"""What will happen when: the instants to come, each with its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, TypeAlias

Event: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]
"""A function, which is called with the instant and these arguments."""


class Agenda:
    """A heap of instants and, beside it, the events of each.

    Equal times are common: what a task makes ready elsewhere arrives, without a transfer time, when it ends.
    """

    def __init__(self) -> None:
        self._instants: list[float] = []
        self._events: dict[float, list[Event]] = {}

    def add(self, at: float, happens: Callable[..., None], *what: Any) -> None:
        """Have `happens(at, *what)` called, after whatever is due then already."""
        events = self._events.get(at)
        if events is None:
            self._events[at] = [(happens, what)]
            heappush(self._instants, at)
        else:
            events.append((happens, what))

    def __iter__(self) -> Iterator[float]:
        """Go from instant to instant; each is given when all of its events have happened.

        Events that events add for the same instant belong to it. Events added once it has been given make it
        come again.
        """
        while self._instants:
            now = heappop(self._instants)
            for happens, what in self._events[now]:
                happens(now, *what)
            del self._events[now]
            yield now
