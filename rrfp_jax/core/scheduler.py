"""The stage scheduler: one pure state machine for readiness-first and for fixed orders.

Theory of operation. A scheduler serves one stage for one step. A task passes through three states:

    waiting --(input arrived / own predecessor dispatched)--> ready --(Dispatch)--> dispatched

  task              is ready when
  F, first virtual  at once: its input is data
  F, elsewhere      its activation has Arrived
  B or I, last      its own F has been dispatched (the device is in order)
  B or I, else      its gradient has Arrived (so its own F was dispatched long before)
  W                 its own I has been dispatched

Whether a chunk's backward of a microbatch is B, or I and W, the schedule says; an arriving gradient is the
same event for both.

On `Room` the scheduler dispatches at most one task. With a `Hint`, that is the hint's choice among the
*runnable* tasks: ready, and admitted (F) or with a place for its gradient (B, W). With a `FixedOrder` it is
the next task of the list if that is ready, and nothing otherwise; limits on what is in flight are not applied
to fixed orders, whose peak is known beforehand. Everything else is common to both.

A microbatch is in flight from the dispatch of its first F here to the dispatch of its last releasing task:
its B or W on every chunk, or, in a forward-only pass, its F on every chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rrfp_jax.core.accumulation import Accumulation, Accumulator
from rrfp_jax.core.admission import Admission
from rrfp_jax.core.events import (
    Accumulate,
    Arrived,
    Dispatch,
    Event,
    IllegalEvent,
    Instruction,
    Room,
    ScheduleError,
)
from rrfp_jax.core.hints import Hint
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.ready import ReadyQueue
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task

DIRECTIONS = (FORWARD, BACKWARD, WEIGHT)
"""The queues of ready tasks: a chunk's B or I of a microbatch, whichever it has, is in that of BACKWARD."""


@dataclass(frozen=True)
class Budget:
    """What a stage may hold in bytes: `costs` per microbatch, of all its chunks there, and their limit."""

    costs: Sequence[int]
    limit: int


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What all stages of a step agree on.

    Attributes:
        limit: most microbatches in flight on a stage under a hint; None for no limit.
        spare_gradients: gradients that may be parked on a stage until their turn comes.
        forward_only: evaluation: no backward; a microbatch leaves when its forward is dispatched.

    Raises:
        ValueError: no microbatches.
    """

    placement: Placement
    microbatches: int
    schedule: Schedule
    limit: int | None = None
    accumulation: Accumulation = "index"
    spare_gradients: int = 2
    forward_only: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches={self.microbatches}: a step needs at least one")


class StageScheduler:
    """Decides what one stage runs in one step. `handle` is the only method that changes it.

    Attributes:
        tasks: how many there are in the step.
    """

    def __init__(self, stage: int, rules: StepRules, budget: Budget | None = None) -> None:
        """A new step.

        Args:
            stage: which it serves.
            rules: of the step.
            budget: in bytes, besides the limit on the number of microbatches.

        Raises:
            ValueError: a fixed order that does not hold every task once, or a limit that is too small.
        """
        placement, microbatches = rules.placement, rules.microbatches
        self.stage = stage
        self.rules = rules
        hint = None if isinstance(rules.schedule, FixedOrder) else rules.schedule
        self._hint: Hint | None = hint
        self._order: Sequence[Task] = ()
        self._split: set[tuple[int, int]] = set()  # (chunk, microbatch) whose backward is I and W
        if hint is None:
            assert isinstance(rules.schedule, FixedOrder)
            self._order = planned_order(rules.schedule, stage, rules)
            self._split = {(c, j) for kind, c, j in self._order if kind is WEIGHT}
        else:
            self._state = hint.start(stage, placement, microbatches)
            if not rules.forward_only:
                self._split = set(hint.split(stage, placement, microbatches))
        self._ready = {kind: ReadyQueue(kind, placement.chunks, microbatches) for kind in DIRECTIONS}
        self._admissions = [Admission([1] * microbatches, rules.limit if hint else None)]
        if budget is not None:
            self._admissions.append(Admission(budget.costs, budget.limit if hint else None))
        self._accumulator = Accumulator(placement.chunks, rules.accumulation, rules.spare_gradients)
        self._arrived: set[Task] = set()
        self._dispatched: set[Task] = set()
        self._releases = [placement.chunks] * microbatches  # releasing tasks to go, per microbatch
        per_microbatch = placement.chunks * (1 if rules.forward_only else 2)
        self.tasks = self._remaining = microbatches * per_microbatch + len(self._split)
        self._history: deque[object] = deque(maxlen=12)
        self._alike = budget is None and placement.chunks == 1
        if placement.virtual_stage(stage, 0) == 0:
            for j in range(microbatches - 1, -1, -1):
                self._ready[FORWARD].add(Task(FORWARD, 0, j))

    @property
    def finished(self) -> bool:
        """Whether every task of the step has been dispatched on this stage."""
        return self._remaining == 0

    @property
    def in_flight(self) -> int:
        """How many microbatches are admitted and not yet released."""
        return self._admissions[0].held

    @property
    def bytes_in_flight(self) -> int:
        """What they cost by the budget; 0 without one."""
        return self._admissions[1].held if len(self._admissions) > 1 else 0

    def ready_tasks(self) -> list[Task]:
        """The ready tasks, runnable or not, in tie order: forwards, then backwards, then weight gradients."""
        return [self.named(task) for queue in self._ready.values() for task in queue]

    def awaited(self) -> str:
        """What the stage waits for if it does not dispatch, for messages."""
        if self.finished:
            return "nothing: all dispatched"
        if self._hint is None:
            return f"{self._order[len(self._dispatched)]}, next in the fixed order"
        if (task := self.first(BACKWARD) or self.first(FORWARD) or self.first(WEIGHT)) is not None:
            return f"nothing: {task} can run"
        ready = self.ready_tasks()
        if ready:
            return f"room for {ready[0]} ({self.in_flight} microbatches in flight)"
        missing = [str(task) for task in self._expected()]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return f"the input of {', '.join(missing[:3])}{more}"

    def _expected(self) -> list[Task]:
        """The tasks whose inputs have not arrived, though nothing on this stage stands in their way."""
        rules, chunks = self.rules, range(self.rules.placement.chunks)
        forwards = [Task(FORWARD, c, j) for c in chunks for j in range(rules.microbatches)]
        backwards = [Task(BACKWARD, c, j) for k, c, j in forwards if Task(k, c, j) in self._dispatched]
        tasks = forwards if rules.forward_only else forwards + backwards
        return [
            self.named(task)
            for task in tasks
            if self.named(task) not in self._dispatched and task not in self._arrived
        ]

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """Take in one event; what the driver must do now, in order.

        Raises:
            IllegalEvent: the event cannot happen in a correct run; the state is unchanged.
            ScheduleError: a hint chose a task that cannot run, or none although one can.
        """
        if isinstance(event, Room):
            task = self._choose()
            return () if task is None else self._dispatch(task)
        self._arrive(event)
        return ()

    # The view that a hint gets of this stage (hints.Runnable).

    def first(self, direction: Kind) -> Task | None:
        """The best runnable task of a direction in tie order."""
        for task in self._ready[direction]:
            if self._runnable(task):
                return self.named(task)
            if direction is FORWARD and self._alike:
                return None  # the lowest is refused, so by the admission rule are all others
        return None

    def was_dispatched(self, task: Task) -> bool:
        """Whether a task of this stage is past."""
        return task in self._dispatched

    def __contains__(self, task: Task) -> bool:
        direction = BACKWARD if task.kind is INPUT else task.kind
        filed = Task(direction, task.chunk, task.microbatch)
        return self.named(filed) == task and filed in self._ready[direction] and self._runnable(filed)

    def named(self, filed: Task) -> Task:
        """The task that runs here for one named by its direction: B may be I."""
        if filed.kind is BACKWARD and (filed.chunk, filed.microbatch) in self._split:
            return Task(INPUT, filed.chunk, filed.microbatch)
        return filed

    def _runnable(self, filed: Task) -> bool:
        kind, chunk, microbatch = filed
        if kind is FORWARD:
            return chunk > 0 or all(admission.admits(microbatch) for admission in self._admissions)
        if kind is BACKWARD and (chunk, microbatch) in self._split:
            return True
        return self._accumulator.accepts(chunk, microbatch)

    def _choose(self) -> Task | None:
        if self._hint is None:
            done = len(self._dispatched)
            return self._order[done] if done < len(self._order) and self._order[done] in self else None
        choice = self._hint.choose(self._state, self)
        if choice is None:
            waiting = self.first(BACKWARD) or self.first(FORWARD) or self.first(WEIGHT)
            if waiting is not None:
                raise ScheduleError(
                    f"{self._hint} chose nothing on stage {self.stage} while {waiting} can run"
                )
            return None
        task, state = choice
        if task not in self:
            raise ScheduleError(f"{self._hint} chose {task} on stage {self.stage}, which cannot run now")
        self._state = state
        return task

    def _arrive(self, event: Arrived) -> None:
        task = event.task
        expected = self._excluded(task)
        if expected is not None:
            raise IllegalEvent(self.stage, event, expected, self._history)
        self._history.append(event)
        self._arrived.add(task)
        self._ready[task.kind].add(task)

    def _excluded(self, task: Task) -> str | None:
        """What was expected instead, if an arrival for `task` cannot happen now."""
        rules = self.rules
        if not (0 <= task.chunk < rules.placement.chunks and 0 <= task.microbatch < rules.microbatches):
            return f"chunk < {rules.placement.chunks} and microbatch < {rules.microbatches}"
        if task.kind not in (FORWARD, BACKWARD) or not rules.placement.needs_arrival(self.stage, task):
            return "F or B whose input comes from another virtual stage"
        if task in self._arrived:
            return "each input once"
        if task.kind is BACKWARD and Task(FORWARD, task.chunk, task.microbatch) not in self._dispatched:
            return "a gradient only after the microbatch's own forward"
        if task.kind is BACKWARD and rules.forward_only:
            return "no gradient in a forward-only pass"
        return None

    def _dispatch(self, task: Task) -> tuple[Instruction, ...]:
        kind, chunk, microbatch = task
        self._history.append(task)
        self._dispatched.add(task)
        self._remaining -= 1
        if kind is FORWARD:
            self._ready[FORWARD].remove(task)
            if chunk == 0:
                for admission in self._admissions:
                    admission.admit(microbatch)
            gradient = Task(BACKWARD, chunk, microbatch)
            if self.rules.forward_only:
                self._release(microbatch)
            elif not self.rules.placement.needs_arrival(self.stage, gradient):
                self._ready[BACKWARD].add(gradient)
            return (Dispatch(task),)
        if kind is INPUT:
            self._ready[BACKWARD].remove(Task(BACKWARD, chunk, microbatch))
            self._ready[WEIGHT].add(Task(WEIGHT, chunk, microbatch))
            return (Dispatch(task),)
        self._ready[kind].remove(task)
        self._release(microbatch)
        due = self._accumulator.add(chunk, microbatch)
        return (Dispatch(task), *(Accumulate(chunk, j) for j in due))

    def _release(self, microbatch: int) -> None:
        self._releases[microbatch] -= 1
        if self._releases[microbatch] == 0:
            for admission in self._admissions:
                admission.release(microbatch)

    def check_invariants(self) -> None:
        """Assert what must hold after every event (for tests; costs a pass over all tasks)."""
        rules, placement = self.rules, self.rules.placement
        ready = self.ready_tasks()
        assert len(set(ready)) == len(ready), "a task is ready twice"
        assert not set(ready) & self._dispatched, "a dispatched task is still ready"
        assert len(self._dispatched) + self._remaining == self.tasks
        for kind, chunk, microbatch in ready + sorted(self._dispatched):
            if kind is WEIGHT:
                assert Task(INPUT, chunk, microbatch) in self._dispatched, "W before its I"
                continue
            filed = Task(FORWARD if kind is FORWARD else BACKWARD, chunk, microbatch)
            if placement.needs_arrival(self.stage, filed):
                assert filed in self._arrived, f"{filed} is ready without its input"
            if kind is not FORWARD:
                assert Task(FORWARD, chunk, microbatch) in self._dispatched
        begun = {task.microbatch for task in self._dispatched if task.kind is FORWARD}
        held = sum(1 for j in begun if self._releases[j] > 0)
        assert held == self.in_flight, f"{held} microbatches held, {self.in_flight} accounted for"
        if self._hint is not None and rules.limit is not None:
            assert self.in_flight <= rules.limit, f"{self.in_flight} in flight, limit {rules.limit}"
        assert self._accumulator.parked <= self._accumulator.spare
        if self.finished:
            assert not ready and self.in_flight == 0 and self._accumulator.parked == 0


def planned_order(schedule: FixedOrder, stage: int, rules: StepRules) -> Sequence[Task]:
    """The stage's fixed order for this step, checked to hold each task once, after what it needs here.

    Raises:
        ValueError: a task is missing, repeated, unknown, or before one that it needs.
    """
    placement, microbatches = rules.placement, rules.microbatches
    order = list(schedule.order(stage, placement, microbatches))
    if rules.forward_only:
        order = [task for task in order if task.kind is FORWARD]
    name, place = type(schedule).__name__, {task: at for at, task in enumerate(order)}
    if len(place) < len(order):
        twice = next(task for at, task in enumerate(order) if place[task] != at)
        raise ValueError(f"schedule {name}, stage {stage}: {twice} is there twice")
    wanted = [(c, j) for c in range(placement.chunks) for j in range(microbatches)]
    for chunk, microbatch in wanted:
        split = Task(INPUT, chunk, microbatch) in place or Task(WEIGHT, chunk, microbatch) in place
        kinds = (
            (FORWARD,) if rules.forward_only else (FORWARD, INPUT, WEIGHT) if split else (FORWARD, BACKWARD)
        )
        tasks = [Task(kind, chunk, microbatch) for kind in kinds]
        for task in tasks:
            if task not in place:
                raise ValueError(f"schedule {name}, stage {stage}: {task} is missing")
        for before, after in pairwise(tasks):
            if place[before] > place[after]:
                raise ValueError(
                    f"schedule {name}, stage {stage}: {after} stands before {before}, which it needs"
                )
        for task in tasks:
            del place[task]
    if place:
        raise ValueError(f"schedule {name}, stage {stage}: {next(iter(place))} does not belong there")
    return order
