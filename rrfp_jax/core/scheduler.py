"""The stage scheduler: one pure state machine for readiness-first and for fixed orders.

Theory of operation. A scheduler serves one stage for one step. A task passes through three states:

    waiting --(input arrived / own forward dispatched)--> ready --(Dispatch)--> dispatched

  task              is ready when
  F, first virtual  at once: its input is data
  F, elsewhere      its activation has Arrived
  B, last virtual   its own F has been dispatched (the device is in order)
  B, elsewhere      its gradient has Arrived (so its own F was dispatched long before)

On `Room` the scheduler dispatches at most one task. With a `Hint`, that is the hint's choice among the
*runnable* tasks: ready, and admitted (F) or with a place for its gradient (B). With a `FixedOrder` it is the
next task of the list if that is ready, and nothing otherwise; the limit on microbatches in flight is not
applied to fixed orders, whose peak is known beforehand. Everything else is common to both.

A microbatch is in flight from the dispatch of its first F here to the dispatch of its last releasing task:
its B on every chunk, or, in a forward-only pass, its F on every chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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
from rrfp_jax.core.ready import ReadyQueue
from rrfp_jax.core.schedules import FixedOrder, Hint, Schedule
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Kind, Placement, Task


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
    """Decides what one stage runs in one step. `handle` is the only method that changes it."""

    def __init__(self, stage: int, rules: StepRules) -> None:
        placement, microbatches = rules.placement, rules.microbatches
        self.stage = stage
        self.rules = rules
        self._limit = None if isinstance(rules.schedule, FixedOrder) else rules.limit
        self._ready = tuple(ReadyQueue(kind, placement.chunks, microbatches) for kind in Kind)
        self._admission = Admission(microbatches, self._limit)
        self._accumulator = Accumulator(placement.chunks, rules.accumulation, rules.spare_gradients)
        self._arrived: set[Task] = set()
        self._dispatched: set[Task] = set()
        self._releases = [placement.chunks] * microbatches  # releasing tasks to go, per microbatch
        self._remaining = microbatches * placement.chunks * (1 if rules.forward_only else 2)
        self._history: deque[object] = deque(maxlen=12)
        self._order: Sequence[Task] = ()
        self._hint: Hint | None = None
        if isinstance(rules.schedule, FixedOrder):
            self._order = planned_order(rules.schedule, stage, rules)
        else:
            self._hint = rules.schedule
            self._state = self._hint.start()
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
        return self._admission.held

    def ready_tasks(self) -> list[Task]:
        """The ready tasks, runnable or not, in tie order: forwards, then backwards."""
        return [task for queue in self._ready for task in queue]

    def awaited(self) -> str:
        """What the stage waits for if it does not dispatch, for messages."""
        if self.finished:
            return "nothing: all dispatched"
        if self._hint is None:
            return f"{self._order[len(self._dispatched)]}, next in the fixed order"
        if (task := self.first(BACKWARD) or self.first(FORWARD)) is not None:
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
        return [task for task in tasks if task not in self._dispatched and task not in self._arrived]

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

    # The view that a hint gets of this stage (schedules.Runnable).

    def first(self, kind: Kind) -> Task | None:
        """The best runnable task of a kind in tie order."""
        for task in self._ready[kind]:
            if self._runnable(task):
                return task
            if kind is FORWARD and self.rules.placement.chunks == 1:
                return None  # the lowest is refused, so by the admission rule are all others
        return None

    def __contains__(self, task: Task) -> bool:
        return task in self._ready[task.kind] and self._runnable(task)

    def _runnable(self, task: Task) -> bool:
        if task.kind is FORWARD:
            return task.chunk > 0 or self._admission.admits(task.microbatch)
        return self._accumulator.accepts(task.chunk, task.microbatch)

    def _choose(self) -> Task | None:
        if self._hint is None:
            done = len(self._dispatched)
            return self._order[done] if done < len(self._order) and self._order[done] in self else None
        choice = self._hint.choose(self._state, self)
        if choice is None:
            waiting = self.first(BACKWARD) or self.first(FORWARD)
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
        if not rules.placement.needs_arrival(self.stage, task):
            return "a task whose input comes from another virtual stage"
        if task in self._arrived:
            return "each input once"
        if task.kind is BACKWARD and Task(FORWARD, task.chunk, task.microbatch) not in self._dispatched:
            return "a gradient only after the microbatch's own forward"
        if task.kind is BACKWARD and rules.forward_only:
            return "no gradient in a forward-only pass"
        return None

    def _dispatch(self, task: Task) -> tuple[Instruction, ...]:
        rules = self.rules
        kind, chunk, microbatch = task
        self._history.append(task)
        self._ready[kind].remove(task)
        self._dispatched.add(task)
        self._remaining -= 1
        if kind is FORWARD:
            if chunk == 0:
                self._admission.admit(microbatch)
            if rules.forward_only:
                self._release(microbatch)
            elif not rules.placement.needs_arrival(self.stage, Task(BACKWARD, chunk, microbatch)):
                self._ready[BACKWARD].add(Task(BACKWARD, chunk, microbatch))
            return (Dispatch(task),)
        self._release(microbatch)
        due = self._accumulator.add(chunk, microbatch)
        return (Dispatch(task), *(Accumulate(chunk, j) for j in due))

    def _release(self, microbatch: int) -> None:
        self._releases[microbatch] -= 1
        if self._releases[microbatch] == 0:
            self._admission.release()

    def check_invariants(self) -> None:
        """Assert what must hold after every event (for tests; costs a pass over all tasks)."""
        rules, placement = self.rules, self.rules.placement
        ready = self.ready_tasks()
        assert len(set(ready)) == len(ready), "a task is ready twice"
        assert not set(ready) & self._dispatched, "a dispatched task is still ready"
        per_microbatch = placement.chunks * (1 if rules.forward_only else 2)
        assert len(self._dispatched) + self._remaining == rules.microbatches * per_microbatch
        for task in ready + sorted(self._dispatched):
            if placement.needs_arrival(self.stage, task):
                assert task in self._arrived, f"{task} is ready without its input"
            elif task.kind is BACKWARD:
                assert Task(FORWARD, task.chunk, task.microbatch) in self._dispatched
        begun = {task.microbatch for task in self._dispatched if task.kind is FORWARD}
        held = sum(1 for j in begun if self._releases[j] > 0)
        assert held == self.in_flight, f"{held} microbatches held, {self.in_flight} accounted for"
        if self._limit is not None:
            assert self.in_flight <= self._limit, f"{self.in_flight} in flight, limit {self._limit}"
        assert self._accumulator.parked <= self._accumulator.spare
        if self.finished:
            assert not ready and self.in_flight == 0 and self._accumulator.parked == 0


def planned_order(schedule: FixedOrder, stage: int, rules: StepRules) -> Sequence[Task]:
    """The stage's fixed order for this step, checked to hold each task once.

    Raises:
        ValueError: a task is missing, repeated or unknown.
    """
    placement, microbatches = rules.placement, rules.microbatches
    kinds = (FORWARD,) if rules.forward_only else tuple(Kind)
    order = [task for task in schedule.order(stage, placement, microbatches) if task.kind in kinds]
    wanted = {Task(k, c, j) for k in kinds for c in range(placement.chunks) for j in range(microbatches)}
    if len(order) != len(wanted) or set(order) != wanted:
        odd = sorted(set(order) ^ wanted) or [task for task in order if order.count(task) > 1]
        name = type(schedule).__name__
        raise ValueError(f"schedule {name}, stage {stage}: {odd[0]} is missing, repeated or unknown")
    return order
