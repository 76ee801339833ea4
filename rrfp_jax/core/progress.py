"""How far a stage is in its step: the state of each of its tasks, WAITING, then READY, then DISPATCHED.

There is no state for "ended": a device runs its programs in order, so that a predecessor on the same stage
need only be dispatched. Tasks are filed in *rows*, one for each direction and chunk: a chunk's B or I of a
microbatch, whichever it has, is in the row of BACKWARD. A row has one byte per microbatch, so the lowest
ready one is found by a search for a byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum

from rrfp_jax.core.tasks import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    WEIGHT,
    Direction,
    Input,
    Kind,
    Placement,
    Task,
)

WAITING, READY, DISPATCHED = range(3)


class ReadyBy(Enum):
    """What makes a waiting task ready."""

    BEGINNING = "the step begins"
    ARRIVAL = "its input arrives"
    PREDECESSOR = "its predecessor is dispatched"


def ready_by(kind: Kind, arrives: bool) -> ReadyBy:
    """What makes a task ready; an input from another virtual stage comes after the task's own forward."""
    if arrives:
        return ReadyBy.ARRIVAL
    return ReadyBy.BEGINNING if KINDS[kind].after is None else ReadyBy.PREDECESSOR


class ArrivalError(Enum):
    """What was expected instead of an arrival that is illegal, in the order in which it is checked."""

    ELSEWHERE = "F, B or I whose input comes from another virtual stage"
    ONCE = "each input once"
    EARLY = "a gradient only after the microbatch's own forward"
    NO_BACKWARD = "no gradient in a forward-only pass"


TaskIndex = Mapping[Kind, Sequence[Sequence[Task]]]
"""`[kind][chunk][microbatch]`: all tasks that there may be in a step."""


def all_tasks(chunks: int, microbatches: int) -> TaskIndex:
    """Every task of every kind, made once for all stages, as making one takes long beside looking it up."""
    return {kind: [[Task(kind, c, j) for j in range(microbatches)] for c in range(chunks)] for kind in Kind}


class ReadyQueue:
    """The tasks of one direction and chunk by microbatch.

    `ready` of them are ready, at `lowest` and above (-1: none). `by` says what makes them so, `predecessor`
    has the tasks that are dispatched before them, and `mixed` whether both B's and I's are among them.
    """

    __slots__ = ("by", "lowest", "mixed", "predecessor", "ready", "states", "tasks")

    def __init__(
        self, tasks: Sequence[Task], by: ReadyBy, predecessor: ReadyQueue | None = None, mixed: bool = False
    ) -> None:
        self.tasks, self.by, self.predecessor, self.mixed = tasks, by, predecessor, mixed
        self.states = bytearray(len(tasks))
        self.ready, self.lowest = 0, -1

    def make_ready(self, microbatch: int) -> Task:
        """Note that a waiting task can run; the task."""
        self.states[microbatch] = READY
        self.ready += 1
        if self.lowest < 0 or microbatch < self.lowest:
            self.lowest = microbatch
        return self.tasks[microbatch]

    def __iter__(self) -> Iterator[Task]:
        """The ready tasks, the lowest microbatch first."""
        at = self.lowest
        while at >= 0:
            yield self.tasks[at]
            at = self.states.find(READY, at + 1)


class Progress:
    """The states of one stage's tasks, in rows by kind and chunk; `splits` backwards run as I and W."""

    def __init__(
        self,
        stage: int,
        placement: Placement,
        names: TaskIndex,
        split: Collection[tuple[int, int]],
        forward_only: bool,
    ) -> None:
        backwards, splits = [list(tasks) for tasks in names[BACKWARD]], [0] * placement.chunks
        for chunk, microbatch in split:
            splits[chunk] += backwards[chunk][microbatch].kind is BACKWARD
            backwards[chunk][microbatch] = names[INPUT][chunk][microbatch]
        self.splits = sum(splits)
        self._chunks, self._microbatches = placement.chunks, len(names[FORWARD][0])
        self._forward_only = forward_only
        self._of: dict[Direction, list[ReadyQueue]] = {}
        before: Sequence[ReadyQueue | None] = [None] * placement.chunks
        for way, tasks in zip(Direction, (names[FORWARD], backwards, names[WEIGHT]), strict=True):
            kind, rows = Kind(way), []
            for c, own in enumerate(tasks):
                by = ready_by(kind, placement.needs_arrival(stage, Task(kind, c, 0)))
                mixed = kind is BACKWARD and 0 < splits[c] < len(own)
                rows.append(ReadyQueue(own, by, before[c], mixed))
            self._of[way] = before = rows
        self.all_rows = [row for rows in self._of.values() for row in rows]
        self.rows = {kind: self._of[kind.direction] for kind in Kind}
        # Best first by the paper's tie order: the lowest chunk's forwards, of the others the highest chunk's.
        self.ranked = {
            way: rows if way is Direction.FORWARD else rows[::-1] for way, rows in self._of.items()
        }
        self._dispatches = [  # by kind and chunk: the task's row, and that in which another becomes ready
            [(row, self._unlocked(kind, c)) for c, row in enumerate(self.rows[kind])] for kind in Kind
        ]
        for row in self._of[Direction.FORWARD]:
            if row.by is ReadyBy.BEGINNING:
                for j in range(self._microbatches):
                    row.make_ready(j)

    def _unlocked(self, kind: Kind, chunk: int) -> ReadyQueue | None:
        """The row in which the dispatch of a task makes that of the same microbatch ready."""
        rows = (self.rows[later][chunk] for later in Kind if KINDS[later].after is kind)
        row = None if self._forward_only else next(rows, None)
        return row if row is not None and row.by is ReadyBy.PREDECESSOR else None

    def state(self, task: Task) -> int:
        """WAITING, READY or DISPATCHED; WAITING for a B that is an I here, and for an I that is a B."""
        row = self.rows[task.kind][task.chunk]
        return row.states[task.microbatch] if row.tasks[task.microbatch] == task else WAITING

    def __contains__(self, task: Task) -> bool:
        known = 0 <= task.chunk < self._chunks and 0 <= task.microbatch < self._microbatches
        return known and self.rows[task.kind][task.chunk].tasks[task.microbatch] == task

    def key(self) -> bytes:
        """The states of all tasks; two stages that differ in nothing else are as far as each other."""
        return b"".join(row.states for row in self.all_rows)

    def task_for(self, direction: Direction, chunk: int, microbatch: int) -> Task:
        """The task that runs here for a direction: for BACKWARD, B or I."""
        return self._of[direction][chunk].tasks[microbatch]

    def arrive(self, arrived: Input) -> str | None:
        """File the arrival of an input; what was expected instead, if it cannot happen now."""
        expected = self.refusal(arrived)
        if expected is None:
            direction, chunk, microbatch = arrived
            self._of[direction][chunk].make_ready(microbatch)
        return expected

    def refusal(self, arrived: Input, coming: Task | None = None) -> str | None:
        """What is expected instead of an arrival that cannot happen now, nor after the dispatch of a task."""
        direction, chunk, microbatch = arrived
        if not (0 <= chunk < self._chunks and 0 <= microbatch < self._microbatches):
            return f"chunk < {self._chunks} and microbatch < {self._microbatches}"
        row = self._of[direction][chunk]
        if row.by is not ReadyBy.ARRIVAL:
            return ArrivalError.ELSEWHERE.value
        if row.states[microbatch] != WAITING:
            return ArrivalError.ONCE.value
        if row.predecessor is not None:
            before = row.predecessor
            if before.states[microbatch] != DISPATCHED and before.tasks[microbatch] != coming:
                return ArrivalError.EARLY.value
            if self._forward_only:
                return ArrivalError.NO_BACKWARD.value
        return None

    def dispatch(self, kind: Kind, chunk: int, microbatch: int) -> tuple[Task, ...]:
        """Note that a ready task runs; the tasks of this stage that become ready by that."""
        row, unlocked = self._dispatches[kind][chunk]
        row.states[microbatch] = DISPATCHED
        row.ready -= 1
        if microbatch == row.lowest:
            row.lowest = row.states.find(READY, microbatch + 1) if row.ready else -1
        return () if unlocked is None else (unlocked.make_ready(microbatch),)

    def ready_tasks(self) -> list[Task]:
        """The ready tasks in tie order: forwards, then backwards, then weight gradients."""
        return [task for rows in self.ranked.values() for row in rows for task in row]

    def missing(self) -> list[Task]:
        """The tasks whose inputs have not arrived, though nothing on this stage stands in their way."""
        ways = list(Direction)[: 1 if self._forward_only else 2]
        return [
            task
            for way in ways
            for row in self._of[way]
            for j, task in enumerate(row.tasks)
            if row.states[j] == WAITING
            and (row.predecessor is None or row.predecessor.states[j] == DISPATCHED)
        ]
