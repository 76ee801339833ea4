"""A device as the driver sees it: programs in order, when each ended, and whether one more may be queued.

When the driver goes to sleep, a thread per device blocks on the result of its oldest program and wakes it.
So neither side polls: polling every 100 us cost a tenth of a core, blocking costs nothing. While the driver
is awake it looks at the devices itself, so that the threads do not take turns with it at the interpreter
lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from queue import SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Any, ClassVar

from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.foresight import DEEPEST, MARGIN, expected_end, ordered_from, room_from, spread_of
from rrfp_jax.core.step_rules import MOST_QUEUED
from rrfp_jax.core.tasks import Task
from rrfp_jax.trace.records import TaskRecord

SET_TIMER_SLACK, GET_TIMER_SLACK = 29, 30  # of prctl(2); they concern the calling thread only

SLACK_NANOSECONDS = 1000


@cache
def _prctl() -> Any:
    return ctypes.CDLL(None).prctl


@contextmanager
def precise_timers() -> Iterator[None]:
    """Inside, this thread's sleeps end on time: one of 20 us took 65 us instead of 103 us."""
    prctl = _prctl()
    before = prctl(GET_TIMER_SLACK, 0, 0, 0, 0)
    prctl(SET_TIMER_SLACK, SLACK_NANOSECONDS, 0, 0, 0)
    try:
        yield
    finally:
        prctl(SET_TIMER_SLACK, before, 0, 0, 0)


LONGEST_JOIN_SECONDS = 1.0

LEAD_SECONDS = 1e-3
"""See `DeviceQueue`; what is best on a GPU is not known yet (benchmarks/results/gpu.md)."""

LATE_SHARE = 0.03
"""Of a program in the mean of how late they are: what is rare, and long, must not be forgotten between."""

LATEST = 10
"""A program counts as so many times as long as usual at most: a pause of the process is none of a program."""


@dataclass(slots=True)
class Running:
    """A dispatched task, or the last update; times in seconds on `time.perf_counter`'s clock."""

    step: int
    stage: int
    task: Task
    bucket: int
    cost: Hashable  # programs of equal cost key are expected to take equally long
    token: Any  # an array, `Tokens` or None: ready when the program has ended
    ready: float
    dispatched: float
    end: float = 0.0
    start: float = 0.0
    delayed: float = 0.0  # at its end, injected
    error: Exception | None = None
    sends: Any = None  # the key by which its outputs are offered
    held: WaitCause | None = None  # what the stage waited for when it was last asked, since the task before
    after: Running | None = None  # what computes its input, if that was foreseen
    copy: float = 0.0  # of the input, from there
    usual: float | None = None
    varies: float = 0.0
    line: Any = None  # the queue that it was submitted to
    is_update: bool = False  # no task, but the last update
    computes: bool = True  # else it only waits for its input

    def wait(self) -> None:
        """Block until the program has ended, and note when and how."""
        token = self.token
        try:
            if token is not None:
                token.block_until_ready()
        except Exception as error:
            self.error = error
        if (after := self.after) is not None:
            after.wait()  # which ends about then, and is seen to end first
        if self.end == 0.0:  # driver and watching thread may both be here
            self.end = perf_counter()
        self.token = None  # so that its memory can be used again

    def record(self, late: float) -> TaskRecord:
        """What happened, once it has ended; `late` is how long its input was held by injected delays."""
        times = self.ready, self.dispatched, self.start, self.end
        return TaskRecord(self.stage, self.task, self.bucket, *times, self.delayed, late, self.held)

    def has_ended(self) -> bool:
        """Whether the program has ended; if so, `end` and `error` are set."""
        token = self.token
        if self.end == 0.0 and token is not None and not token.is_ready():
            return False
        if (after := self.after) is not None and (not after.has_ended() or after.error is not None):
            return False  # an error is told of the program that raised it
        if self.end == 0.0:
            self.wait()
        return True


class DeviceQueue:
    """The programs in flight on one device. Each step is a context.

    A thread calls `wake` when a watched program has ended. It lives from the first one to `close`, or to the
    end of a step that is broken off. Another program is queued when those that there are may all end within
    `lead` seconds.

    Attributes:
        flights: dispatched and not ended, in order.
        settled: ended, and not yet given by `ended`.
        is_ordered: whether what it runs next follows from a fixed order alone.
        free: when the device had ended what was there before those.
        late: see core/foresight.py.
        room: when one more program may be queued, as it was last worked out; -inf once that may have changed.
        as_it_is: whether programs end when the device ends them; else nothing can be foreseen.
    """

    as_it_is: ClassVar[bool] = True

    def __init__(self, name: str, wake: Callable[[], None], lead: float = LEAD_SECONDS) -> None:
        self._name, self._wake = name, wake
        self._lead, self._ahead, self._most = lead, 0.0, MOST_QUEUED
        self.flights: deque[Running] = deque()
        self._watched: SimpleQueue[Running | None] = SimpleQueue()
        self._last_watched: Running | None = None
        self._usual: dict[Hashable, tuple[float, float]] = {}  # duration and its deviation, running means
        self.settled: list[Running] = []
        self.free, self.room, self.late, self._foresees, self.is_ordered = 0.0, -inf, 0.0, False, False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> DeviceQueue:
        self._ahead, self._most = 0.0, MOST_QUEUED  # whatever the step before had
        self.room, self._foresees, self.is_ordered = -inf, False, False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self._last_watched = None
        self.settled.clear()
        self.flights.clear()  # of a step that was broken off: what its programs compute can go
        if kind is not None and (thread := self._thread) is not None:
            self.close()
            # Its program may never end; the thread is a daemon and must not hold the error back.
            thread.join(LONGEST_JOIN_SECONDS)

    def close(self) -> None:
        """Let the thread end, if there is one; returns at once."""
        self._watched.put(None)
        self._thread, self._watched = None, SimpleQueue()  # a program that hangs keeps the old ones

    def submit(self, running: Running) -> None:
        """Note a program that has just been dispatched."""
        running.line = self
        running.usual, running.varies = self._usual.get(running.cost, (None, 0.0))
        self.flights.append(running)
        self.room = -inf

    def watch(self) -> None:
        """Wake the driver when the oldest program ends; to be woken by each of eight cost it 5 to 8 %."""
        if not self.flights or (oldest := self.flights[0]) is self._last_watched:
            return
        self._last_watched = oldest
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._watched,), name=f"rrfp-watch-{self._name}", daemon=True
            )
            self._thread.start()
        self._watched.put(oldest)

    def ended(self) -> list[Running]:
        """The programs that have ended since the last call, in order."""
        self._settle()
        finished, self.settled = self.settled, []
        return finished

    def _settle(self, upto: Running | None = None) -> None:
        """Say of the programs that have ended, or of those up to one, when they ran."""
        while (upto is None or not upto.start) and self.flights and self.flights[0].has_ended():
            running = self.flights[0]
            if (after := running.after) is not None and not after.start:
                after.line._settle(after)
            self.flights.popleft()
            self.room = -inf
            if self._foresees:  # a later one may have been seen to end first, by who waited for its output
                running.end = min(running.end, *(later.end or running.end for later in self.flights), inf)
            running.start = max(running.dispatched, self.free)
            if after is not None:
                running.ready = min(after.end + running.copy, max(running.end, after.end))
                running.start, running.after = max(running.start, running.ready), None
            self.free = running.end = max(running.end, running.start)  # each end is noticed a little late
            if running.is_update:
                for later in self.flights:  # neither ready nor dispatched before that
                    later.ready = max(later.ready, self.free)
                    later.dispatched = max(later.dispatched, self.free)
            seconds = running.end - running.start
            mean, deviation = self._usual.get(running.cost, (seconds, 0.0))
            if running.sends is not None:
                late = min(max(0.0, seconds - MARGIN * mean), LATEST * mean)
                self.late += LATE_SHARE * (late - self.late)
            deviation = 0.9 * deviation + 0.1 * abs(seconds - mean)
            self._usual[running.cost] = 0.9 * mean + 0.1 * seconds, deviation
            self.settled.append(running)

    def room_at(self, now: float) -> float:
        """When one more program may be queued: `now` or before means at once, inf not before an end."""
        if self.room <= now:  # else it is still so: what is expected can only become later
            self.room = self._room_at(now)
        return self.room

    def _room_at(self, now: float) -> float:
        flights = [running for running in self.flights if running.computes]
        count = len(flights)
        if count == 0 or (count == 1 and flights[0].is_update):
            return now
        if count >= self._most:
            return inf
        if self.is_ordered:
            return ordered_from(flights)
        if self._foresees:
            return room_from(flights, expected_end(self, now))
        work = sum(inf if running.usual is None else running.usual for running in flights)
        return max(flights[0].dispatched, self.free) + work - spread_of(flights) - self._lead - self._ahead

    def decide_ahead(self, seconds: float, most: int = DEEPEST) -> None:
        """Have room so much earlier than usual, in this step, for so many programs."""
        self._ahead, self._most, self.room = seconds, most if seconds else MOST_QUEUED, -inf

    def foresee(self, most: int, ordered: bool) -> None:
        """Have room by what is expected, in this step, for so many programs; see `is_ordered`."""
        self._foresees, self._most, self.is_ordered, self.room = True, most, ordered, -inf

    def next_event(self, now: float) -> float:
        """When, after `now`, something happens here of which no thread tells; inf if nothing will."""
        room = self.room_at(now)
        return room if room > now else inf

    @property
    def running(self) -> list[Task]:
        """The tasks on the device, oldest first."""
        return [running.task for running in self.flights if not running.is_update]

    @property
    def is_updating(self) -> bool:
        """Whether the last update has not ended, as far as is known."""
        return bool(self.flights) and self.flights[0].is_update

    def _watch(self, watched: SimpleQueue[Running | None]) -> None:
        while (running := watched.get()) is not None:
            if running.end == 0.0:
                running.wait()
            if not running.start:  # else the driver has seen it
                self._wake()
