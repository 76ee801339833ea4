"""Delays injected into a run, to see what a schedule makes of them."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

from rrfp_jax.core.tasks import Kind, Placement, Task
from rrfp_jax.errors import UsageError, refusing
from rrfp_jax.fields import check_fields, shown
from rrfp_jax.runtime.engine.device import DeviceQueue, Running
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.transport.protocol import Arrival
from rrfp_jax.trace import jitter
from rrfp_jax.trace.costs import StepCosts

QueueFactory: TypeAlias = Callable[[str, Callable[[], None]], DeviceQueue]

LONGEST_SECONDS = 3600
"""Longest delay: nobody waits longer for a single message."""


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
        with refusing():
            jitter.Jitter(jitter.by_name(self.jitter), self.seed)
        for name in ("late_readiness", "skew", "link_delay", "link_bandwidth"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise UsageError(f"{name}={value}: give a finite number, at least 0")
            if value > LONGEST_SECONDS and name != "link_bandwidth":
                raise UsageError(f"{name}={value}: in seconds; give at most {LONGEST_SECONDS}")
            if 0 < value < 1 and name == "link_bandwidth":
                raise UsageError(f"{name}={value}: in bytes per second; give at least 1, or 0 for no limit")
        if self.delayed_link < -1:
            raise UsageError(f"delayed_link={self.delayed_link}: give a stage's number, or -1 for all links")

    @classmethod
    def of(cls, given: Delays | str) -> Delays:
        """Delays as they are, or of text such as "jitter=J2,skew=0.001"; none of empty text.

        Raises:
            UsageError: it is no such text, or names a delay that there is not, or that cannot be.
        """
        if isinstance(given, cls):
            return given
        known: dict[str, Any] = {item.name: type(getattr(cls, item.name)) for item in fields(cls)}
        values = {}
        for part in str(given).split(",") if given != "" else ():
            name, _, value = part.strip().partition("=")
            try:
                values[name] = known[name](value)
            except (KeyError, ValueError):
                raise UsageError(
                    f"delays={shown(given)}: give NAME=VALUE, such as jitter=J2,skew=0.001; names are "
                    f"{', '.join(known)}"
                ) from None
        return cls(**values)

    def __str__(self) -> str:
        told = {item.name: getattr(self, item.name) for item in fields(self)}
        return ",".join(f"{name}={value}" for name, value in told.items() if value != getattr(Delays, name))

    def queue(self) -> QueueFactory:
        """Makes the queue of a device."""
        model = jitter.Jitter(jitter.by_name(self.jitter), self.seed)
        if not model.level.probability:
            return DeviceQueue
        return partial(JitteredQueue, delay=lambda r, seconds: model.delay(r.step, r.stage, r.task, seconds))

    def arrivals(
        self, placement: Placement, costs: StepCosts | None = None, rank: int = 0
    ) -> ArrivalDelays | None:
        """Holds every arrival until it would have come here; None if nothing is asked."""
        if not (costs or self.late_readiness or self.skew or self.link_delay or self.link_bandwidth):
            return None
        free: dict[tuple[int, int], float] = {}  # when each directed link is

        def release(arrival: Arrival, now: float) -> tuple[float, float]:
            """Hold it after the link, after its transfer by the costs, and until it is noticed."""
            round, stage_replica, wanted = arrival.key
            stage = stage_replica % placement.stages
            source = placement.source(stage, wanted)
            assert source is not None, f"nobody sends the input of {wanted}"
            if source[0] == stage:
                return now, 0.0  # another chunk of the same stage: no link is between them
            took = 0.0
            if costs is not None:
                direction, chunk, microbatch = source[1]
                took = costs.transfer(source[0], Task(Kind(direction), chunk, microbatch))
            at, link = arrival.produced, (source[0], stage_replica)
            only = self.delayed_link
            applies = only < 0 or {only, only + 1} == {source[0], stage}
            if self.link_bandwidth and applies:
                at = max(at, free.get(link, 0.0)) + nbytes(arrival.arrays) / self.link_bandwidth
                free[link] = at
            late = self.late_readiness
            if self.skew:
                late += self.skew * jitter.uniforms(self.seed ^ (rank << 32), round, stage_replica, wanted)[0]
            until = max(now, at + took + (self.link_delay if applies else 0.0)) + late
            return until, until - max(now, arrival.produced + took)

        return ArrivalDelays(release)


class ArrivalDelays:
    """Holds arrivals of a step: `release` gives until when, and how much of that is injected (s)."""

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


class JitteredQueue(DeviceQueue):
    """A real device that is kept busy for a while longer after each task.

    `delay` gives the seconds to add after a task that took that many. No program is queued behind a running
    one, except where a group decides ahead: then one may run during the delay of the one before, and counts
    as if it had run behind it.
    """

    as_it_is = False

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
            return float("inf") if self.flights or self._held else now
        if len(self.flights) + len(self._held) >= self._most:
            return float("inf")
        held = self._busy_until - self._lead - self._ahead if self._held else now
        return max(held, super().room_at(now))

    def next_event(self, now: float) -> float:
        room = super().next_event(now)
        return min(self._held[0].end, room) if self._held else room

    @property
    def running(self) -> list[Task]:
        return [running.task for running in self._held] + super().running
