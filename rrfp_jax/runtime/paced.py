"""Devices that take as long as they are told: for machines without accelerators, and for injected delays."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from rrfp_jax.core.tasks import Task
from rrfp_jax.runtime.device import DeviceQueue, Running

TOKEN_SECONDS = 5e-5
"""Pause before a real program that is late is looked at again."""


class PacedQueue(DeviceQueue):
    """Stands in for an accelerator: in order, one task at a time, each ends when it is due.

    The real, tiny programs run at once; what counts is when they are said to have ended. No thread: the
    driver sleeps until the next task is due.

    Args:
        name, wake: see `DeviceQueue`.
        seconds: how long a task keeps the device busy (s).
    """

    def __init__(self, name: str, wake: Callable[[], None], seconds: Callable[[Running], float]) -> None:
        super().__init__(name, wake)
        self._seconds = seconds
        self._due: dict[Task, tuple[float, float]] = {}  # start and end
        self._last_due = 0.0

    def __enter__(self) -> PacedQueue:
        self._running.clear()
        self._due.clear()
        return self

    def __exit__(self, *error: object) -> None:
        """No thread is there to be ended."""

    def submit(self, running: Running) -> None:
        """See `DeviceQueue.submit`."""
        start = max(running.dispatched, self._last_due)
        self._last_due = start + self._seconds(running)
        self._due[running.task] = start, self._last_due
        self._running.append(running)

    def watch(self) -> None:
        """Nothing to watch: `next_event` tells when the next task is due."""

    def ended(self) -> list[tuple[Running, float]]:
        """See `DeviceQueue.ended`."""
        finished = []
        now = perf_counter()
        while self._running and self._due[self._running[0].task][1] <= now and self._running[0].has_ended():
            running = self._running.popleft()
            start, running.end = self._due.pop(running.task)
            finished.append((running, start))
        return finished

    def room_at(self, now: float) -> float:
        """See `DeviceQueue.room_at`; here durations are known."""
        if not self._running:
            return now
        full = len(self._running) >= self._most
        return float("inf") if full else self._last_due - self._lead - self._ahead

    def next_event(self, now: float) -> float:
        """See `DeviceQueue.next_event`."""
        if not self._running:
            return float("inf")
        due = max(self._due[self._running[0].task][1], now + TOKEN_SECONDS)
        return min(due, super().next_event(now))


class JitteredQueue(DeviceQueue):
    """A real device that is kept busy for a while longer after each task.

    No program is queued behind a running one, because it would run during the delay.

    Args:
        name, wake: see `DeviceQueue`.
        delay: seconds to add after a task that took that many.
    """

    def __init__(self, name: str, wake: Callable[[], None], delay: Callable[[Running, float], float]) -> None:
        super().__init__(name, wake)
        self._delay = delay
        self._held: tuple[Running, float] | None = None

    def __enter__(self) -> JitteredQueue:
        super().__enter__()
        self._held = None
        return self

    def ended(self) -> list[tuple[Running, float]]:
        """See `DeviceQueue.ended`."""
        for running, start in super().ended():  # one at most
            running.end += self._delay(running, running.end - start)
            self._free_since = running.end
            self._held = running, start
        if self._held is None or self._held[0].end > perf_counter():
            return []
        held, self._held = self._held, None
        return [held]

    def room_at(self, now: float) -> float:
        """See `DeviceQueue.room_at`."""
        return float("inf") if self._running or self._held else now

    def next_event(self, now: float) -> float:
        """See `DeviceQueue.next_event`."""
        return self._held[0].end if self._held else float("inf")

    @property
    def running(self) -> list[Task]:
        """See `DeviceQueue.running`."""
        return super().running + ([self._held[0].task] if self._held else [])
