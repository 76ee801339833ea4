"""Devices whose tasks last as long as they are told: to stand in for accelerators, and to inject delays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

from rrfp_jax.core.tasks import Task
from rrfp_jax.runtime.driver.device import DeviceQueue, Running

TOKEN_SECONDS = 5e-5
"""Pause before a real program that is late is looked at again."""


class PacedQueue(DeviceQueue):
    """Stands in for an accelerator: in order, one task at a time, each ends when it is due.

    The real, tiny programs run at once; what counts is when they are said to have ended. No thread: the
    driver sleeps until the next task is due.

    Args:
        name, wake: see `DeviceQueue`.
        seconds: how long a task keeps the device busy (s), its delay included.
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

    No program is queued behind a running one, except where a group decides ahead: then one may run during the
    delay of the one before, and counts as if it had run behind it.

    Args:
        name, wake: see `DeviceQueue`.
        delay: seconds to add after a task that took that many.
    """

    def __init__(self, name: str, wake: Callable[[], None], delay: Callable[[Running, float], float]) -> None:
        super().__init__(name, wake)
        self._delay = delay
        self._held: deque[tuple[Running, float]] = deque()  # have ended, but not with their delays; starts
        self._busy_until = 0.0

    def __enter__(self) -> JitteredQueue:
        super().__enter__()
        self._held.clear()
        return self

    def ended(self) -> list[tuple[Running, float]]:
        """See `DeviceQueue.ended`."""
        for running, began in super().ended():
            seconds, start = running.end - began, max(began, self._busy_until)
            running.delayed = self._delay(running, seconds)
            running.end = self._busy_until = start + seconds + running.delayed
            self._held.append((running, start))
        now, over = perf_counter(), []
        while self._held and self._held[0][0].end <= now:
            over.append(self._held.popleft())
        return over

    def room_at(self, now: float) -> float:
        """See `DeviceQueue.room_at`."""
        if not self._ahead:
            return float("inf") if self._running or self._held else now
        if len(self._running) + len(self._held) >= self._most:
            return float("inf")
        held = self._busy_until - self._lead - self._ahead if self._held else now
        return max(held, super().room_at(now))

    def next_event(self, now: float) -> float:
        """See `DeviceQueue.next_event`."""
        room = super().next_event(now)
        return min(self._held[0][0].end, room) if self._held else room

    @property
    def running(self) -> list[Task]:
        """See `DeviceQueue.running`."""
        return [running.task for running, _ in self._held] + super().running
