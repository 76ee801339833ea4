"""The stage scheduler: one pure state machine for readiness-first and for fixed orders.

It serves one stage for one step. `progress.py` knows which tasks are ready; this file decides which of them
runs. On `Room` it dispatches at most one task. With a `Hint`, that is the hint's choice among the *runnable*
tasks: ready, and admitted (F) or with a place for its gradient (B, W). With a `FixedOrder` it is the next
task of the list if that can run, and nothing otherwise; limits on what is in flight are not applied to fixed
orders, whose peak is known beforehand. `Chosen` dispatches a task that another rank of the stage's group has
chosen by a hint, if it is ready here.

A chunk of a microbatch is in flight from the dispatch of its F to that of its B or W. Under a hint that is
charged whole, and in a forward-only pass, a microbatch is in flight from its first F to its last task here.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from rrfp_jax.core.admission import Accumulator, Admission, ByChunk, Whole
from rrfp_jax.core.events import (
    ROOM,
    Arrived,
    Chosen,
    Dispatch,
    Event,
    IllegalEvent,
    Room,
    ScheduleError,
    Wait,
    WaitCause,
)
from rrfp_jax.core.hints import DIRECTIONS
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.progress import DISPATCHED, READY, Progress, ReadyQueue
from rrfp_jax.core.step_rules import Budget, StepRules, charges_of
from rrfp_jax.core.tasks import CHARGES, Direction, Input, Kind, Task

KEPT = 4096
"""Entries of a stage. A microbatch leaves about four on each chunk: two inputs and two tasks."""

QUOTED = 12
"""How many of the latest events a message quotes."""


def _microbatch(event: Event, task: Task | None) -> int | None:
    if isinstance(event, Arrived):
        return event.input.microbatch
    return None if task is None else task.microbatch


def _in_words(entries: Iterable[tuple[Event, Task | None]]) -> str:
    words = (str(event) if task is None else f"dispatched {task}" for event, task in entries)
    return ", ".join(words) or "nothing yet"


class RunnableTasks:
    """The view of a stage that its hint gets: see `hints.HintView`.

    `cached` is a task found to be runnable since the last dispatch. It saves a second look at what a hint has
    just been told of, and changes no answer: only a dispatch can take a task's permission. Tasks that it is
    `without` are left out, as if they were not ready.
    """

    def __init__(self, progress: Progress, admissions: Sequence[Admission], accumulator: Accumulator) -> None:
        self._admissions, self._accumulator = admissions, accumulator
        self._ranked, self._rows = progress.ranked, progress.rows
        self._all_rows = progress.all_rows
        self.cached: Task | None = None
        self.without: Collection[Task] = ()

    def first(self, direction: Direction) -> Task | None:
        for row in self._ranked[direction]:
            if row.ready:
                task = row.tasks[row.lowest]
                found = task if self._permits(*task) else self._first_beyond(row)
                if found is not None:
                    self.cached = found
                    return found
        return None

    def runnable(self, direction: Direction) -> Iterator[Task]:
        return (task for task in chain(*self._ranked[direction]) if self._permits(*task))

    def heads(self, rank: Mapping[Task, int]) -> Iterator[Task]:
        found = []
        for row in self._all_rows:
            if row.ready:
                task = row.tasks[row.lowest]
                found.append((rank[task], task, row))
        found.sort()  # by rank, no two of which are equal
        while found:
            _, task, row = found.pop(0)
            if self._permits(*task):
                self.cached = task
                yield task
            elif (beyond := self._first_beyond(row)) is not None:
                insort(found, (rank[beyond], beyond, row))

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        return all(admission.leaves_room(task, order, start, stop) for admission in self._admissions)

    def past(self, order: Sequence[Task], at: int) -> int:
        rows, end = self._rows, len(order)
        while at < end:
            kind, chunk, microbatch = order[at]
            if rows[kind][chunk].states[microbatch] != DISPATCHED:
                break
            at += 1
        return at

    def __contains__(self, task: Task) -> bool:
        if task is self.cached:
            return True
        kind, chunk, microbatch = task
        row = self._rows[kind][chunk]
        if row.states[microbatch] != READY or row.tasks[microbatch] != task:
            return False
        if not self._permits(kind, chunk, microbatch):
            return False
        self.cached = task
        return True

    def anything(self) -> Task | None:
        """Some runnable task, or None."""
        return next((task for way in DIRECTIONS if (task := self.first(way)) is not None), None)

    def _permits(self, kind: Kind, chunk: int, microbatch: int) -> bool:
        """Whether a ready task is also admitted, or has a place for its gradient."""
        charge = CHARGES[kind]
        if self.without and (kind, chunk, microbatch) in self.without:
            return False
        if charge < 0:
            return self._accumulator.accepts(chunk, microbatch)
        if charge > 0:
            for admission in self._admissions:  # a call of all takes twice as long
                if not admission.admits(chunk, microbatch):
                    return False
        return True

    def _first_beyond(self, row: ReadyQueue) -> Task | None:
        """The lowest runnable task of a row whose lowest ready one is refused."""
        for task in row:
            if self._permits(*task):
                return task
            if task in self.without:
                continue
            if CHARGES[task.kind] > 0:
                if any(admission.refuses_beyond(*task[1:]) for admission in self._admissions):
                    return None
            elif not row.mixed:
                return None  # see Accumulator.accepts
        return None


_new = tuple.__new__  # a named tuple's own takes twice as long


class StageScheduler:
    """Decides what one stage runs in one step. `handle` is the only method that changes it.

    Raises:
        ValueError: a fixed order that does not hold every task once, or a limit that is too small.

    Attributes:
        tasks: how many there are in the step.
        view: what its hint sees of it; asking changes nothing.
        by_chunk, whole: the rules of admission; the tests try unsafe ones.
        log: the latest events, each with the task that was dispatched on it; with none for an arrival.
        kept: events that it holds; None for all.
    """

    by_chunk: ClassVar[type[Admission]] = ByChunk
    whole: ClassVar[type[Admission]] = Whole
    kept: ClassVar[int | None] = KEPT

    def __init__(self, stage: int, rules: StepRules, budget: Budget | None = None) -> None:
        own, chunks = rules.stages[stage], rules.placement.chunks
        self.stage, self.rules, self.budget = stage, rules, budget
        self._hint, self._state, self._waits, self._order = own.hint, own.state, own.waits, own.order
        self._progress = Progress(own.tasks)
        rule = self.by_chunk if own.by_chunk else self.whole
        charges = own.charges if budget is None else charges_of(rules, budget)
        self._admissions: list[Admission] = [rule(costs, limit) for costs, limit in charges]
        self._accumulator = Accumulator(chunks, rules.accumulation, rules.spare_gradients)
        self.view = RunnableTasks(self._progress, self._admissions, self._accumulator)
        self._forward_only = rules.forward_only
        self._to_run = [chunks] * rules.microbatches  # in a forward-only pass
        self.tasks = self._remaining = own.tasks.count
        self.log = deque[tuple[Event, Task | None]](maxlen=self.kept)
        self._note = self.log.append

    @property
    def finished(self) -> bool:
        """Whether every task of the step has been dispatched on this stage."""
        return self._remaining == 0

    @property
    def in_flight(self) -> int:
        """How many chunks of microbatches are charged."""
        return self._admissions[0].held

    def ready_tasks(self) -> list[Task]:
        """The ready tasks, runnable or not, in tie order: forwards, then backwards, then weight gradients."""
        return self._progress.ready_tasks()

    def awaited(self, named: bool = True) -> Wait:
        """What the stage waits for if it does not dispatch; any thread may ask.

        To name the tasks takes a look at all of the step's; otherwise they are left out.
        """
        if not self._remaining:
            return Wait(WaitCause.DONE)
        if self._hint is None:
            return Wait(WaitCause.ORDER, (self._order[self.tasks - self._remaining],))
        if (row := next((row for row in self._progress.all_rows if row.ready), None)) is None:
            return Wait(WaitCause.INPUT, tuple(self._progress.missing()) if named else ())
        # A view of its own: asking one is noted there.
        view = RunnableTasks(self._progress, self._admissions, self._accumulator)
        if (task := view.anything()) is not None:
            reserves = self._waits and self._hint.choose(self._state, view) is None
            return Wait(WaitCause.RESERVED if reserves else WaitCause.RUNNABLE, (task,))
        cause = WaitCause.ROOM if CHARGES[row.tasks[0].kind] > 0 else WaitCause.TURN
        tasks = tuple(self.ready_tasks()) if named else ()
        return Wait(cause, tasks, in_flight=self.in_flight, by_chunk=self.rules.placement.chunks > 1)

    def handle(self, event: Event) -> Dispatch | None:
        """Take in one event; what the driver must do now, if anything.

        Only `Room` and `Chosen` lead to a dispatch.

        Raises:
            IllegalEvent: the event cannot happen in a correct run; the state is unchanged.
            ScheduleError: a hint chose a task that cannot run, or none although one can.
        """
        if isinstance(event, Room):
            choice = self._foresee(event) if event.foreseen else self._choose(event.late)
            if choice is None:
                return None
            task, self._state = choice
            return self._dispatch(task, event)
        if isinstance(event, Chosen):
            if self._hint is None:
                raise self.illegal(event, "arrivals and room, as the order is fixed")
            state = self._progress.state(event.task) if event.task in self._progress else DISPATCHED
            if state == DISPATCHED:
                raise self.illegal(event, "a task of the step, each once")
            return self._dispatch(event.task, event) if state == READY else None
        if (expected := self._progress.arrive(event.input)) is not None:
            raise self.illegal(event, expected)
        self._note((event, None))
        return None

    def choice(self) -> Task | None:
        """What would be dispatched on `Room` now."""
        choice = self._choose()
        return None if choice is None else choice[0]

    def refusal(self, arrived: Input, coming: Task | None = None) -> str | None:
        """See `Progress.refusal`."""
        return self._progress.refusal(arrived, coming)

    def illegal(self, event: object, expected: str) -> IllegalEvent:
        """The error for an event that the rules exclude, with what came before it."""
        about = getattr(event, "input", None) or getattr(event, "task", None)
        history = self._recently()
        if about is not None:
            own = (entry for entry in self.log if _microbatch(*entry) == about.microbatch)
            history = f"of microbatch {about.microbatch} so far: {_in_words(own)}; {history}"
        return IllegalEvent(self.stage, event, expected, history)

    def _recently(self) -> str:
        return f"recently: {_in_words(list(self.log)[-QUOTED:])}"

    def task_for(self, direction: Direction, chunk: int, microbatch: int) -> Task:
        """The task that runs here for a direction: for BACKWARD, B or I."""
        return self._progress.rows[direction][chunk].tasks[microbatch]

    def _choose(self, late: Collection[Task] = ()) -> tuple[Task, Any] | None:
        """The task to run now and the hint's state after it, late ones only if it chooses no other."""
        if self._hint is None:
            task = self._order[self.tasks - self._remaining] if self._remaining else None
            return (task, None) if task is not None and task in self.view else None
        choice = None
        if late:
            self.view.cached, self.view.without = None, late
            choice = self._hint.choose(self._state, self.view)
            self.view.without = ()
        if choice is None:
            choice = self._hint.choose(self._state, self.view)
        if choice is None:
            if not self._waits and (task := self.view.anything()) is not None:
                raise ScheduleError(f"{self._hint} chose nothing on stage {self.stage} while {task} can run")
            return None
        try:
            task, _ = choice
            if task in self.view:
                return choice
        except (IndexError, TypeError, ValueError):
            raise ScheduleError(
                f"{self._hint} returned {choice!r} on stage {self.stage}; a hint returns a task of this "
                f"step, and its state"
            ) from None
        raise ScheduleError(
            f"{self._hint} chose {task} on stage {self.stage}, which cannot run now; {self._recently()}"
        )

    def _foresee(self, room: Room) -> tuple[Task, Any] | None:
        """As `_choose` with foreseen inputs as arrived, else without; after it only that of the choice is."""
        there, choice = list[Input](), None
        try:
            for foreseen in room.foreseen:
                if (expected := self._progress.arrive(foreseen)) is not None:
                    raise self.illegal(Arrived(foreseen), expected)
                there.append(foreseen)
            choice = self._choose(room.late)
        finally:
            self.view.cached = None
            for foreseen in there:
                if choice is None or self.task_for(*foreseen) != choice[0]:
                    self._progress.recall(foreseen)
        if choice is None and self._waits:  # one that is held back holds back those behind it
            choice = self._choose(room.late)
        return choice

    def _dispatch(self, task: Task, event: Event) -> Dispatch:
        kind, chunk, microbatch = task
        self._remaining -= 1
        self.view.cached = None
        ready = self._progress.dispatch(kind, chunk, microbatch)
        additions: tuple[int, ...] = ()
        charge = CHARGES[kind]
        if charge > 0:
            for admission in self._admissions:
                admission.admit(chunk, microbatch)
            if self._forward_only:
                self._leave(microbatch)
        elif charge < 0:
            for admission in self._admissions:
                admission.release(chunk, microbatch)
            additions = self._accumulator.add(chunk, microbatch)
        self._note((event, task))
        return _new(Dispatch, (task, additions, ready))

    def _leave(self, microbatch: int) -> None:
        """Release a microbatch of a forward-only pass once all of it has run."""
        self._to_run[microbatch] -= 1
        if self._to_run[microbatch] == 0:
            for admission in self._admissions:
                for chunk in range(self.rules.placement.chunks):
                    admission.release(chunk, microbatch)


def check_can_end(rules: StepRules) -> None:
    """Run the step without time: whatever a stage can do it does, until all is done or nobody can go on.

    Durations cannot matter: a fixed order has no choice, so whoever waits for ever here waits for ever. A
    stage waits for the input of its next task, or, if that is a B or W, for a place for its gradient: then
    its own order parks more gradients than there are spare buffers.

    Raises:
        ValueError: an incomplete order, or orders that wait for ever, saying who for what.
    """
    stages = [StageScheduler(stage, rules) for stage in range(rules.placement.stages)]
    todo = list(range(len(stages)))
    while todo:
        stage = todo.pop()
        while dispatch := stages[stage].handle(ROOM):
            if (destination := rules.placement.destination(stage, dispatch.task)) is not None:
                stages[destination[0]].handle(Arrived(destination[1]))
                todo.append(destination[0])
    if stuck := [f"stage {s.stage} waits for {s.awaited()}" for s in stages if not s.finished]:
        title = rules.schedule.title if isinstance(rules.schedule, FixedOrder) else str(rules.schedule)
        raise ValueError(f"{title} must deadlock: {'; '.join(stuck)}")
