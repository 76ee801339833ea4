"""How far a stage is in its step: the state of each of its tasks.

A virtual stage has for each microbatch the tasks F and B, or F, I and W. Each goes through three states:

    WAITING -> READY -> DISPATCHED

There is no state for "ended": a device runs its programs in order, so that a predecessor on the same stage
need only be dispatched. Everything else in the core decides *which* of the ready tasks is dispatched.

Tasks are filed in *rows*, one for each direction and chunk. A chunk's B or I of a microbatch, whichever it
has, is in the row of BACKWARD. A row has one byte per microbatch, so the lowest ready one is found by a
search for a byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain

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
    """What makes a task ready.

    Where its input comes from another virtual stage (`arrives`), that always comes last: a gradient exists
    only after the forward of its own microbatch.
    """
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

    Attributes:
        tasks: by microbatch, as they are called on this stage.
        states: by microbatch, WAITING, READY or DISPATCHED.
        ready: how many are ready.
        lowest: the lowest microbatch that is ready, -1 if none is.
        by: what makes them ready.
        predecessor: the row of the tasks that are dispatched before them, if there are any.
        mixed: whether both B's and I's are among them.
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

        def causes(kind: Kind) -> Iterator[ReadyBy]:
            tasks = (row[0] for row in names[kind])
            return (ready_by(kind, placement.needs_arrival(stage, task)) for task in tasks)

        self.forwards = [ReadyQueue(*row) for row in zip(names[FORWARD], causes(FORWARD), strict=True)]
        self.backwards = [
            ReadyQueue(tasks, why, forward, mixed=0 < count < len(tasks))
            for tasks, why, forward, count in zip(
                backwards, causes(BACKWARD), self.forwards, splits, strict=True
            )
        ]
        self.weights = [
            ReadyQueue(*row) for row in zip(names[WEIGHT], causes(WEIGHT), self.backwards, strict=True)
        ]
        self._of = dict(zip(Direction, (self.forwards, self.backwards, self.weights), strict=True))
        self.rows = {kind: self._of[kind.direction] for kind in Kind}
        best_first = (self.forwards, self.backwards[::-1], self.weights[::-1])  # the paper's tie order
        self.ranked = dict(zip(Direction, best_first, strict=True))
        self._chunks, self._microbatches = placement.chunks, len(names[FORWARD][0])
        self._forward_only = forward_only
        self._dispatches = [  # by kind and chunk: the task's row, and that in which another becomes ready
            [(row, self._unlocked(kind, c)) for c, row in enumerate(self.rows[kind])] for kind in Kind
        ]
        for row in self.forwards:
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
        return b"".join(row.states for row in chain(self.forwards, self.backwards, self.weights))

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
        rows = self.forwards if self._forward_only else self.forwards + self.backwards
        return [
            task
            for row in rows
            for j, task in enumerate(row.tasks)
            if row.states[j] == WAITING
            and (row.predecessor is None or row.predecessor.states[j] == DISPATCHED)
        ]

    def check_invariants(self) -> None:
        """Assert what must hold at any time (for tests; costs a pass over all tasks)."""
        for row in chain(self.forwards, self.backwards, self.weights):
            ready = [task for task, state in zip(row.tasks, row.states, strict=True) if state == READY]
            assert list(row) == ready
            assert row.ready == len(ready)
            assert row.lowest == (ready[0].microbatch if ready else -1)
            for j, task in enumerate(row.tasks if row.predecessor else ()):
                assert row.predecessor is not None
                before, after = row.predecessor.tasks[j], KINDS[task.kind].after
                past = row.predecessor.states[j] == DISPATCHED and before.kind is after
                assert past or row.states[j] == WAITING, f"{task} before {before}"
                if row.by is ReadyBy.PREDECESSOR and not self._forward_only:
                    assert past == (row.states[j] != WAITING), f"{task} is ready when {before} is dispatched"
