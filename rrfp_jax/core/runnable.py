"""Which of a stage's ready tasks may run now: those admitted, or with a place for their gradient.

Which kinds need which, `transitions.RULES` says. Only questions are answered here: asking changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from rrfp_jax.core.accumulation import Accumulator
from rrfp_jax.core.admission import Admission
from rrfp_jax.core.progress import Progress, Row
from rrfp_jax.core.tasks import Direction, Kind, Task
from rrfp_jax.core.transitions import ADDS, ADMITTED, DISPATCHED, READY


class RunnableTasks:
    """The view of a stage that its hint gets: see `hints.HintView`.

    Attributes:
        known: a task found to be runnable since the last dispatch, or None. It saves a second look at what a
            hint has just been told of, and changes no answer: only a dispatch can take a task's permission.
    """

    def __init__(self, progress: Progress, admissions: Sequence[Admission], accumulator: Accumulator) -> None:
        self._progress, self._admissions, self._accumulator = progress, admissions, accumulator
        self._ranked, self._rows = progress.ranked, progress.rows
        self.known: Task | None = None

    def first(self, direction: Direction) -> Task | None:
        """The best runnable task of a direction in tie order."""
        for row in self._ranked[direction]:
            if row.ready:
                task = row.tasks[row.lowest]
                found = task if self._permits(*task) else self._first_beyond(row)
                if found is not None:
                    self.known = found
                    return found
        return None

    def runnable(self, direction: Direction) -> Iterator[Task]:
        """All runnable tasks of a direction in tie order."""
        return (task for task in chain(*self._ranked[direction]) if self._permits(*task))

    def heads(self) -> Iterator[Task]:
        """The lowest runnable task of every direction and chunk."""
        for rows in self._ranked.values():
            for row in rows:
                if row.ready:
                    task = row.tasks[row.lowest]
                    found = task if self._permits(*task) else self._first_beyond(row)
                    if found is not None:
                        yield found

    def leaves_room(self, task: Task, ahead: Sequence[Task]) -> bool:
        """Whether tasks could follow in their order if an F were dispatched before them."""
        return all(admission.leaves_room(task, ahead) for admission in self._admissions)

    def was_dispatched(self, task: Task) -> bool:
        """Whether a task of this stage is past."""
        return self._progress.state(task) == DISPATCHED

    def __contains__(self, task: Task) -> bool:
        if task is self.known:
            return True
        kind, chunk, microbatch = task
        row = self._rows[kind][chunk]
        if row.states[microbatch] != READY or row.tasks[microbatch] != task:
            return False
        return self._permits(kind, chunk, microbatch)

    def anything(self) -> Task | None:
        """Some runnable task, or None."""
        return next((task for way in Direction if (task := self.first(way)) is not None), None)

    def _permits(self, kind: Kind, chunk: int, microbatch: int) -> bool:
        """Whether a ready task is also admitted, or has a place for its gradient."""
        if ADDS[kind]:
            return self._accumulator.accepts(chunk, microbatch)
        if ADMITTED[kind]:
            for admission in self._admissions:  # a call of all takes twice as long
                if not admission.admits(chunk, microbatch):
                    return False
        return True

    def _first_beyond(self, row: Row) -> Task | None:
        """The lowest runnable task of a row whose lowest ready one is refused."""
        for task in row:
            if self._permits(*task):
                return task
            if ADMITTED[task.kind]:
                if any(admission.refuses_beyond(*task[1:]) for admission in self._admissions):
                    return None
            elif not row.mixed:
                return None  # see Accumulator.accepts
        return None
