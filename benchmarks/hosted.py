"""A step in virtual time on devices that are driven by a host, which takes its time.

`rrfp_jax.sim.engine` dispatches what is ready the moment a device is free. Here the host notices ends and
arrivals half a round trip late, and a program that it dispatches reaches its device another half later.
Devices run programs in order; one whose input is not there holds up those behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from operator import attrgetter
from statistics import mean
from typing import Any

from rrfp_jax.core.events import ROOM, Arrived, Dispatch, Room
from rrfp_jax.core.foresight import (
    DEEPEST,
    MARGIN,
    ROUND_TRIP_SECONDS,
    SPREAD,
    Dispatching,
    expected_end,
    ordered_from,
    room_from,
    rooms,
    spread_of,
)
from rrfp_jax.core.step_rules import MOST_QUEUED, StepRules
from rrfp_jax.core.tasks import Input, Task
from rrfp_jax.sim.engine import Device, EventQueue, Parallel, connect
from rrfp_jax.trace.costs import StepCosts
from rrfp_jax.trace.records import Part, StepTrace, TaskRecord

SOON = 0.1
"""Round trips before the host looks again, where what it expects is overdue."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What drives the devices; times in seconds.

    Attributes:
        round_trip: from the end of a program to the start of the next.
        dispatch: "ready" or "foreseen"; see core/foresight.py.
        lead: if "ready", a second program is queued when the first may end within it.
        varies: by which share durations are known to vary, in the mean.
        deepest: if "foreseen", most programs on a device.
    """

    round_trip: float = ROUND_TRIP_SECONDS
    dispatch: Dispatching = "ready"
    lead: float = 1e-3
    varies: float = SPREAD
    deepest: int = DEEPEST


class _Program:
    """A `Flight`."""

    __slots__ = ("after", "copy", "dispatched", "end", "line", "ready", "task", "usual", "varies")

    def __init__(
        self, line: _Line, task: Task, dispatched: float, ready: float, usual: float, varies: float
    ) -> None:
        self.line, self.task, self.dispatched, self.ready = line, task, dispatched, ready
        self.usual: float | None = usual
        self.varies = varies
        self.end, self.copy = 0.0, 0.0
        self.after: _Program | None = None


class _Line(Device):
    """A device, and what the host knows of it."""

    __slots__ = ("coming", "flights", "here", "late", "launched", "runs", "timer")

    def __init__(self, stage: int, rules: StepRules) -> None:
        super().__init__(stage, rules, None)
        self.flights: deque[_Program] = deque()  # whose end the host has not noticed
        # Of inputs on their way: what computes them, and how long their copies take.
        self.coming: dict[Input, tuple[_Program, float]] = {}
        self.launched: deque[_Program] = deque()  # that are on the device and have not begun
        self.here = set[Input]()
        self.runs, self.timer = False, inf
        self.late = 0.0


class HostSimulation:
    """One step; `estimates` are what the host expects of tasks and transfers."""

    def __init__(self, rules: StepRules, costs: StepCosts, estimates: StepCosts, host: Host) -> None:
        self._rules, self._costs, self._estimates, self._host = rules, costs, estimates, host
        self._half = host.round_trip / 2
        self._agenda: EventQueue[Any] = EventQueue()
        self._network = Parallel(self._costs, self._agenda, self._delivered, lambda now, device: None)
        self._lines = [_Line(stage, rules) for stage in range(rules.placement.stages)]
        connect(self._lines, rules)
        for line in self._lines:
            if late := [*self._lateness(line)]:
                line.late = mean(late)
        self._woken: dict[_Line, None] = {}
        self._records: list[TaskRecord] = []

    def run(self) -> StepTrace:
        """From 0 on."""
        for line in self._lines:
            self._agenda.add(0.0, self._wake, line, None)
        for now in self._agenda:
            while self._woken:  # what one is given may be foreseen by another
                line = min(self._woken, key=attrgetter("stage"))
                del self._woken[line]
                self._fill(now, line)
        waits = [f"stage {x.stage} waits for {x.scheduler.awaited()}" for x in self._lines]
        assert all(line.scheduler.finished for line in self._lines), waits
        return StepTrace(0, self._rules.placement, [Part.of(self._records)])

    def _lateness(self, line: _Line) -> Iterator[float]:
        """By how much tasks that send take longer than is allowed for, as known from earlier steps."""
        for task in chain.from_iterable(tasks for tasks, *_ in self._rules.stages[line.stage].tasks.rows):
            if line.routes[task.kind][task.chunk] is not None:
                allowed = MARGIN * self._estimates.duration(line.stage, task)
                yield max(0.0, self._costs.duration(line.stage, task) - allowed)

    def _wake(self, now: float, line: _Line, what: object = None) -> None:
        self._woken[line] = None

    def _fill(self, now: float, line: _Line) -> None:
        """Dispatch what can be, and be woken when more can."""
        while not line.scheduler.finished:
            end = expected_end(line, now)
            if (room := self._room_at(now, line, end)) > now:
                return self._alarm(now, line, room)
            asked, soonest = self._asked(now, line, end)
            if (dispatch := next(filter(None, map(line.scheduler.handle, asked)), None)) is None:
                return self._alarm(now, line, soonest)
            self._dispatch(now, line, dispatch)

    def _room_at(self, now: float, line: _Line, end: float) -> float:
        count = len(line.flights)
        if self._host.dispatch == "foreseen":
            if count >= self._host.deepest:
                return inf
            if self._rules.hint is None:
                return ordered_from(line.flights)
            return room_from(line.flights, end, self._host.round_trip)
        if not count:
            return now
        return end - spread_of(line.flights) - self._host.lead if count < MOST_QUEUED else inf

    def _asked(self, now: float, line: _Line, end: float) -> tuple[list[Room], float]:
        """See `rooms`."""
        if self._host.dispatch == "ready":
            return [ROOM], inf
        if self._rules.hint is None:
            return [Room(foreseen=[*line.coming])], inf
        expected = ((one, program, copy) for one, (program, copy) in line.coming.items())
        return rooms(expected, end, now, self._host.round_trip)

    def _alarm(self, now: float, line: _Line, at: float) -> None:
        if at < inf and (at < line.timer or line.timer <= now):
            line.timer = max(at, now + SOON * self._host.round_trip)
            self._agenda.add(line.timer, self._wake, line, None)

    def _dispatch(self, now: float, line: _Line, dispatch: Dispatch) -> None:
        kind, chunk, microbatch = task = dispatch.task
        usual = self._estimates.duration(line.stage, task)
        program = _Program(
            line, task, now, line.ready[kind][chunk][microbatch], usual, self._host.varies * usual
        )
        if (on_its_way := line.coming.pop(task.input, None)) is not None:
            program.after, program.copy = on_its_way
        for later in dispatch.ready:
            line.ready[later.kind][chunk][microbatch] = now
        line.flights.append(program)
        self._agenda.add(now + self._half, self._launched, line, program)
        if (route := line.routes[kind][chunk]) is not None:
            receiver, arrivals = route
            if receiver is line:  # what it sends itself is there for whatever is dispatched after it
                self._noticed(now, line, arrivals[microbatch])
            else:
                copy = self._estimates.transfer(line.stage, task)
                receiver.coming[arrivals[microbatch].input] = program, copy  # type: ignore[attr-defined]
                self._wake(now, receiver)  # type: ignore[arg-type]

    def _launched(self, now: float, line: _Line, program: _Program) -> None:
        line.launched.append(program)
        self._start(now, line)

    def _start(self, now: float, line: _Line) -> None:
        """Let the next program run if the device is free and its input is there."""
        if line.runs or not line.launched:
            return
        program = line.launched[0]
        if program.after is not None and program.task.input not in line.here:
            return
        line.launched.popleft()
        line.runs = True
        end = now + self._costs.duration(line.stage, program.task)
        times = program.ready, program.dispatched, now, end
        self._records.append(TaskRecord(line.stage, program.task, 0, *times))
        self._agenda.add(end, self._ended, line, program)

    def _ended(self, now: float, line: _Line, program: _Program) -> None:
        line.runs = False
        kind, chunk, microbatch = program.task
        if (route := line.routes[kind][chunk]) is not None and route[0] is not line:
            self._network.send(now, line, program.task, route[0], route[1][microbatch])
        self._agenda.add(now + self._half, partial(self._free, at=now), line, program)
        self._start(now, line)

    def _free(self, now: float, line: _Line, program: _Program, at: float) -> None:
        line.flights.popleft()
        program.end = line.free = at
        program.after = None
        self._wake(now, line)

    def _delivered(self, now: float, line: Any, arrival: Arrived) -> None:
        line.here.add(arrival.input)
        self._start(now, line)
        self._agenda.add(now + self._half, self._noticed, line, arrival)

    def _noticed(self, now: float, line: _Line, arrival: Arrived) -> None:
        """The host learns of an arrival; of one that was foreseen the stage knows."""
        direction, chunk, microbatch = arrival.input
        line.ready[direction][chunk][microbatch] = now
        if line.coming.pop(arrival.input, None) is not None or arrival.input not in line.here:
            line.scheduler.handle(arrival)
            self._wake(now, line)
