"""Devices whose tasks last as long as costs say: they stand in for accelerators."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from rrfp_jax.core.tasks import Task
from rrfp_jax.runtime.engine.device import DeviceQueue, Running
from rrfp_jax.runtime.engine.pacing import Delays, QueueFactory
from rrfp_jax.trace import jitter
from rrfp_jax.trace.costs import StepCosts

TOKEN_SECONDS = 5e-5
"""Pause before a real program that is late is looked at again."""


class PacedQueue(DeviceQueue):
    """Stands in for an accelerator: in order, one task at a time, each ends when it is due.

    The real, tiny programs run at once; what counts is when they are said to have ended: `seconds` gives how
    long a task keeps the device busy, its delay included. No thread: the driver sleeps until the next is due.
    """

    as_it_is = False

    def __init__(self, name: str, wake: Callable[[], None], seconds: Callable[[Running], float]) -> None:
        super().__init__(name, wake)
        self._seconds = seconds
        self._due: dict[Task, float] = {}
        self._last_due = 0.0

    def __enter__(self) -> PacedQueue:
        self.flights.clear()
        self._due.clear()
        return self

    def __exit__(self, *error: object) -> None:
        """No thread is there to be ended."""

    def submit(self, running: Running) -> None:
        running.start = max(running.dispatched, self._last_due)
        self._last_due = self._due[running.task] = running.start + self._seconds(running)
        self.flights.append(running)

    def watch(self) -> None:
        """Nothing to watch: `next_event` tells when the next task is due."""

    def ended(self) -> list[Running]:
        finished = []
        now = perf_counter()
        while self.flights and self._due[self.flights[0].task] <= now and self.flights[0].has_ended():
            running = self.flights.popleft()
            running.end = self._due.pop(running.task)
            finished.append(running)
        return finished

    def room_at(self, now: float) -> float:
        if not self.flights:
            return now
        full = len(self.flights) >= self._most
        return float("inf") if full else self._last_due - self._lead - self._ahead

    def next_event(self, now: float) -> float:
        if not self.flights:
            return float("inf")
        due = max(self._due[self.flights[0].task], now + TOKEN_SECONDS)
        return min(due, super().next_event(now))


def paced(delays: Delays, costs: StepCosts) -> QueueFactory:
    """Makes queues whose tasks take what the costs say, and the jitter of some delays."""
    model = jitter.Jitter(jitter.by_name(delays.jitter), delays.seed)

    def seconds(running: Running) -> float:
        own = costs.duration(running.stage, running.task)
        running.delayed = model.delay(running.step, running.stage, running.task, own)
        return own + running.delayed

    return lambda name, wake: PacedQueue(name, wake, seconds)
