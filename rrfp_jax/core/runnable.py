"""Which of a stage's ready tasks may run now. Only questions: asking changes no answer.

task           may run, once it is ready, if
F              it is admitted (`admission`)
I              always: it makes no gradient of the weights
B, W           there is a place for its gradient of the weights (`accumulation`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from rrfp_jax.core.accumulation import Accumulator
from rrfp_jax.core.admission import Admission
from rrfp_jax.core.progress import DISPATCHED, READY, Progress, Row
from rrfp_jax.core.tasks import FORWARD, INPUT, Direction, Task


class RunnableTasks:
    """The view of a stage that its hint gets: see `hints.HintView`."""

    def __init__(self, progress: Progress, admissions: Sequence[Admission], accumulator: Accumulator) -> None:
        self._progress, self._admissions, self._accumulator = progress, admissions, accumulator
        self._ranked = progress.ranked

    def first(self, direction: Direction) -> Task | None:
        """The best runnable task of a direction in tie order."""
        for row in self._ranked[direction]:
            task = row.first
            if task is not None:
                found = task if self._may_run(task) else self._first_beyond(row)
                if found is not None:
                    return found
        return None

    def runnable(self, direction: Direction) -> Iterator[Task]:
        """All runnable tasks of a direction in tie order."""
        return filter(self._may_run, chain(*self._ranked[direction]))

    def heads(self) -> Iterator[Task]:
        """The lowest runnable task of every direction and chunk."""
        for rows in self._ranked.values():
            for row in rows:
                task = row.first
                if task is not None:
                    found = task if self._may_run(task) else self._first_beyond(row)
                    if found is not None:
                        yield found

    def leaves_room(self, task: Task, ahead: Sequence[Task]) -> bool:
        """Whether tasks could follow in their order if an F were dispatched before them."""
        return all(admission.leaves_room(task, ahead) for admission in self._admissions)

    def was_dispatched(self, task: Task) -> bool:
        """Whether a task of this stage is past."""
        return self._progress.state(task) == DISPATCHED

    def __contains__(self, task: Task) -> bool:
        return self._progress.state(task) == READY and self._may_run(task)

    def anything(self) -> Task | None:
        """Some runnable task, or None."""
        return next((task for way in Direction if (task := self.first(way)) is not None), None)

    def _may_run(self, task: Task) -> bool:
        """Whether a ready task is also admitted, or has a place for its gradient."""
        kind, chunk, microbatch = task
        if kind is FORWARD:
            for admission in self._admissions:  # noqa: SIM110  (a call of all takes twice as long)
                if not admission.admits(chunk, microbatch):
                    return False
            return True
        return kind is INPUT or self._accumulator.accepts(chunk, microbatch)

    def _first_beyond(self, row: Row) -> Task | None:
        """The lowest runnable task of a row whose lowest ready one is refused."""
        for task in row:
            if self._may_run(task):
                return task
            if task.kind is FORWARD:
                if any(admission.refuses_beyond(*task[1:]) for admission in self._admissions):
                    return None
            elif not row.mixed:
                return None  # see Accumulator.accepts
        return None
