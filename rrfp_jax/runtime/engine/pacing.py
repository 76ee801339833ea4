"""Delays injected into a run, to see what a schedule makes of them.

Devices whose tasks last as long as they are told: to stand in for accelerators, and to inject delays.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

from rrfp_jax.core.tasks import Kind, Placement, Task
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields
from rrfp_jax.runtime.engine.device import DeviceQueue, Running
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.transport.protocol import Arrival
from rrfp_jax.trace import jitter
from rrfp_jax.trace.costs import Costs

QueueFactory: TypeAlias = Callable[[str, Callable[[], None]], DeviceQueue]

LONGEST_SECONDS = 3600
"""Of a delay: nobody waits longer for a single message."""


@dataclass(frozen=True, kw_only=True)
class Delays:
    """What to inject. The same seed delays the same tasks, whatever the schedule.

    Attributes:
        jitter: level J0 (none) to J3 of the paper's section 7.6: tasks take longer at random.
        late_readiness: every arrival is noticed so much later (s).
        skew: every arrival is noticed later at random, at most so much (s), differently on every process.
        link_delay: every transfer between stages takes so much longer (s).
        link_bandwidth: of each directed link, whose transfers queue up (bytes/s); 0 for no limit.
        delayed_link: the stage before the only link with that delay and bandwidth, there and back; -1 for
            all links.
        seed: of the jitter.

    Raises:
        UsageError: an unknown level, a negative number, a delay above an hour, a bandwidth below a byte per
            second, or a seed that does not fit 64 signed bits.
    """

    jitter: str = "J0"
    late_readiness: float = 0.0
    skew: float = 0.0
    link_delay: float = 0.0
    link_bandwidth: float = 0.0
    delayed_link: int = -1
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            jitter.Jitter(jitter.by_name(self.jitter), self.seed)
        except ValueError as error:
            raise UsageError(str(error)) from None
        for name in ("late_readiness", "skew", "link_delay", "link_bandwidth"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name}={getattr(self, name)}: give a finite number, at least 0")
        for name in ("late_readiness", "skew", "link_delay"):
            if getattr(self, name) > LONGEST_SECONDS:
                raise UsageError(f"{name}={getattr(self, name)}: in seconds; give at most {LONGEST_SECONDS}")
        if 0 < self.link_bandwidth < 1:
            raise UsageError(
                f"link_bandwidth={self.link_bandwidth}: in bytes per second; give at least 1, or 0 for "
                f"no limit"
            )
        if self.delayed_link < -1:
            raise UsageError(
                f"delayed_link={self.delayed_link}: give the number of a stage, or -1 for all links"
            )

    def queue(self, costs: Costs | None = None) -> QueueFactory:
        """Makes the queue of a device; with costs the device is paced by them."""
        model = jitter.Jitter(jitter.by_name(self.jitter), self.seed)

        def delay(running: Running, seconds: float) -> float:
            return model.delay(running.step, running.stage, running.task, seconds)

        if costs is not None:

            def seconds(running: Running) -> float:
                own = costs.duration(running.stage, running.task)
                running.delayed = delay(running, own)
                return own + running.delayed

            return lambda name, wake: PacedQueue(name, wake, seconds)
        if not model.level.probability:
            return DeviceQueue
        return lambda name, wake: JitteredQueue(name, wake, delay)

    def arrivals(
        self, placement: Placement, costs: Costs | None = None, rank: int = 0
    ) -> ArrivalDelays | None:
        """Holds every arrival until it would have come here; None if nothing is asked."""
        if not (costs or self.late_readiness or self.skew or self.link_delay or self.link_bandwidth):
            return None
        return ArrivalDelays(_Links(self, placement, costs, rank).release)


class ArrivalDelays:
    """Holds arrivals of a step.

    `release` gives until when an arrival that comes now is held, and how much of that is injected (s).
    """

    def __init__(self, release: Callable[[Arrival, float], tuple[float, float]]) -> None:
        self._release = release
        self._held: list[tuple[float, int, Arrival]] = []
        self._numbers = itertools.count()

    def hold(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """The arrivals that are due, of these and of earlier ones."""
        now = perf_counter()
        for arrival in arrivals:
            until, late = self._release(arrival, now)
            heapq.heappush(self._held, (until, next(self._numbers), arrival._replace(late=late)))
        released = []
        while self._held and self._held[0][0] <= now:
            released.append(heapq.heappop(self._held)[2])
        return released

    def next_release(self) -> float:
        """When the next one is due; inf if none is held."""
        return self._held[0][0] if self._held else float("inf")

    def clear(self) -> None:
        """Forget what a step held that was broken off."""
        self._held.clear()


class _Links:
    """When arrivals are released: after the link, after their transfer by the costs, noticed late."""

    def __init__(self, delays: Delays, placement: Placement, costs: Costs | None, rank: int) -> None:
        self._delays, self._placement, self._costs, self._rank = delays, placement, costs, rank
        self._free: dict[tuple[int, int], float] = {}  # when each directed link is

    def release(self, arrival: Arrival, now: float) -> tuple[float, float]:
        """Until when it is held, and how much of that is injected (s); a transfer by the costs is not."""
        delays, (round, stage_replica, wanted) = self._delays, arrival.key
        stage = stage_replica % self._placement.stages
        source = self._placement.source(stage, wanted)
        assert source is not None, f"nobody sends the input of {wanted}"
        if source[0] == stage:
            return now, 0.0  # another chunk of the same stage: no link is between them
        took = 0.0
        if self._costs is not None:
            direction, chunk, microbatch = source[1]
            took = self._costs.transfer(source[0], Task(Kind(direction), chunk, microbatch))
        at = arrival.produced
        only = delays.delayed_link
        applies = only < 0 or {only, only + 1} == {source[0], stage}
        if delays.link_bandwidth and applies:
            link = source[0], stage_replica
            at = max(at, self._free.get(link, 0.0)) + nbytes(arrival.arrays) / delays.link_bandwidth
            self._free[link] = at
        late = delays.late_readiness
        if delays.skew:
            late += (
                delays.skew
                * jitter.uniforms(delays.seed ^ (self._rank << 32), round, stage_replica, wanted)[0]
            )
        until = max(now, at + took + (delays.link_delay if applies else 0.0)) + late
        return until, until - max(now, arrival.produced + took)


TOKEN_SECONDS = 5e-5
"""Pause before a real program that is late is looked at again."""


class PacedQueue(DeviceQueue):
    """Stands in for an accelerator: in order, one task at a time, each ends when it is due.

    The real, tiny programs run at once; what counts is when they are said to have ended: `seconds` gives how
    long a task keeps the device busy, its delay included. No thread: the driver sleeps until the next is due.
    """

    def __init__(self, name: str, wake: Callable[[], None], seconds: Callable[[Running], float]) -> None:
        super().__init__(name, wake)
        self._seconds = seconds
        self._due: dict[Task, float] = {}
        self._last_due = 0.0

    def __enter__(self) -> PacedQueue:
        self._running.clear()
        self._due.clear()
        return self

    def __exit__(self, *error: object) -> None:
        """No thread is there to be ended."""

    def submit(self, running: Running) -> None:
        running.start = max(running.dispatched, self._last_due)
        self._last_due = self._due[running.task] = running.start + self._seconds(running)
        self._running.append(running)

    def watch(self) -> None:
        """Nothing to watch: `next_event` tells when the next task is due."""

    def ended(self) -> list[Running]:
        finished = []
        now = perf_counter()
        while self._running and self._due[self._running[0].task] <= now and self._running[0].has_ended():
            running = self._running.popleft()
            running.end = self._due.pop(running.task)
            finished.append(running)
        return finished

    def room_at(self, now: float) -> float:
        if not self._running:
            return now
        full = len(self._running) >= self._most
        return float("inf") if full else self._last_due - self._lead - self._ahead

    def next_event(self, now: float) -> float:
        if not self._running:
            return float("inf")
        due = max(self._due[self._running[0].task], now + TOKEN_SECONDS)
        return min(due, super().next_event(now))


class JitteredQueue(DeviceQueue):
    """A real device that is kept busy for a while longer after each task.

    `delay` gives the seconds to add after a task that took that many. No program is queued behind a running
    one, except where a group decides ahead: then one may run during the delay of the one before, and counts
    as if it had run behind it.
    """

    def __init__(self, name: str, wake: Callable[[], None], delay: Callable[[Running, float], float]) -> None:
        super().__init__(name, wake)
        self._delay = delay
        self._held: deque[Running] = deque()  # have ended, but not with their delays
        self._busy_until = 0.0

    def __enter__(self) -> JitteredQueue:
        super().__enter__()
        self._held.clear()
        return self

    def ended(self) -> list[Running]:
        for running in super().ended():
            seconds, running.start = running.end - running.start, max(running.start, self._busy_until)
            running.delayed = self._delay(running, seconds)
            running.end = self._busy_until = running.start + seconds + running.delayed
            self._held.append(running)
        now, over = perf_counter(), []
        while self._held and self._held[0].end <= now:
            over.append(self._held.popleft())
        return over

    def room_at(self, now: float) -> float:
        if not self._ahead:
            return float("inf") if self._running or self._held else now
        if len(self._running) + len(self._held) >= self._most:
            return float("inf")
        held = self._busy_until - self._lead - self._ahead if self._held else now
        return max(held, super().room_at(now))

    def next_event(self, now: float) -> float:
        room = super().next_event(now)
        return min(self._held[0].end, room) if self._held else room

    @property
    def running(self) -> list[Task]:
        return [running.task for running in self._held] + super().running
