"""Which of a stage's ready tasks may run now: those admitted, or with a place for their gradient.

Which kinds need which, `transitions.RULES` says. Only questions are answered here: asking changes no answer.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
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
        self._all_rows = [row for rows in progress.ranked.values() for row in rows]
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

    def heads(self, rank: Mapping[Task, int]) -> Iterator[Task]:
        """The lowest runnable task of every direction and chunk, by rank."""
        found = []
        for row in self._all_rows:
            if row.ready:
                task = row.tasks[row.lowest]
                found.append((rank[task], task, row))
        found.sort()  # by rank, no two of which are equal
        while found:
            _, task, row = found.pop(0)
            if self._permits(*task):
                self.known = task
                yield task
            elif (beyond := self._first_beyond(row)) is not None:
                insort(found, (rank[beyond], beyond, row))

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        """Whether a part of an order could follow if an F were dispatched before it."""
        return all(admission.leaves_room(task, order, start, stop) for admission in self._admissions)

    def was_dispatched(self, task: Task) -> bool:
        """Whether a task of this stage is past."""
        return self._progress.state(task) == DISPATCHED

    def past(self, order: Sequence[Task], at: int) -> int:
        """Where the first task of an order stands, from `at` on, that is not past."""
        rows, end = self._rows, len(order)
        while at < end:
            kind, chunk, microbatch = order[at]
            if rows[kind][chunk].states[microbatch] != DISPATCHED:
                break
            at += 1
        return at

    def __contains__(self, task: Task) -> bool:
        if task is self.known:
            return True
        kind, chunk, microbatch = task
        row = self._rows[kind][chunk]
        if row.states[microbatch] != READY or row.tasks[microbatch] != task:
            return False
        if not self._permits(kind, chunk, microbatch):
            return False
        self.known = task
        return True

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
