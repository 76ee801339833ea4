"""How far a stage is in its step: the state of each of its tasks, WAITING, then READY, then DISPATCHED.

There is no state for "ended": a device runs its programs in order, so that a predecessor on the same stage
need only be dispatched. Tasks are filed in *rows*, one for each direction and chunk: a chunk's B or I of a
microbatch, whichever it has, is in the row of BACKWARD. A row has one byte per microbatch, so the lowest
ready one is found by a search for a byte.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from rrfp_jax.core.tasks import (
    BACKWARD,
    CHARGES,
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


Split: TypeAlias = Collection[tuple[int, int]]
"""The (chunk, microbatch) of a stage whose backward runs as I and W instead of as B."""

TaskIndex = Mapping[Kind, Sequence[Sequence[Task]]]
"""`[kind][chunk][microbatch]`: all tasks that there may be in a step."""


def all_tasks(chunks: int, microbatches: int) -> TaskIndex:
    """Every task of every kind, made once for all stages, as making one takes long beside looking it up."""
    return {kind: [[Task(kind, c, j) for j in range(microbatches)] for c in range(chunks)] for kind in Kind}


class StageTasks:
    """The tasks of a stage and what makes them ready: the same in every step by the same rules.

    Attributes:
        rows: by direction and then chunk, its tasks by microbatch, what makes them ready, and whether both
            B's and I's are among them.
        backward_kinds: by chunk, whether there are B's among its tasks, I's and W's, or both.
        count: of the tasks that run, of which I and W are two.
    """

    def __init__(
        self, stage: int, placement: Placement, names: TaskIndex, split: Split, forward_only: bool
    ) -> None:
        backwards, splits = [list(tasks) for tasks in names[BACKWARD]], [0] * placement.chunks
        for chunk, microbatch in split:
            if not (0 <= chunk < placement.chunks and 0 <= microbatch < len(backwards[chunk])):
                raise ValueError(f"stage {stage}: split() has chunk {chunk} of microbatch {microbatch}")
            splits[chunk] += backwards[chunk][microbatch].kind is BACKWARD
            backwards[chunk][microbatch] = names[INPUT][chunk][microbatch]
        self.chunks, self.microbatches = placement.chunks, len(names[FORWARD][0])
        self.forward_only = forward_only
        self.backward_kinds: list[frozenset[Kind]] = []
        for count in splits:
            fused = () if count == self.microbatches else (BACKWARD,)
            apart = KINDS[BACKWARD].parts if count else ()
            self.backward_kinds.append(frozenset(() if forward_only else (*fused, *apart)))
        self.count = self.microbatches * self.chunks * (1 if forward_only else 2) + sum(splits)
        self.rows: list[tuple[Sequence[Task], ReadyBy, bool]] = []
        for way, tasks in zip(Direction, (names[FORWARD], backwards, names[WEIGHT]), strict=True):
            for c, own in enumerate(tasks):
                by = ready_by(Kind(way), placement.needs_arrival(stage, Task(Kind(way), c, 0)))
                self.rows.append((own, by, tasks is backwards and 0 < splits[c] < len(own)))


class ReadyQueue:
    """The tasks of one direction and chunk by microbatch.

    `ready` of them are ready, at `lowest` and above (-1: none). `by` says what makes them so, and `mixed`
    whether both B's and I's are among them. `predecessor` has the tasks that are dispatched before them,
    `successor` those that these make ready, if they do.
    """

    def __init__(self, tasks: Sequence[Task], by: ReadyBy, mixed: bool, before: ReadyQueue | None) -> None:
        self.tasks, self.by, self.mixed = tasks, by, mixed
        self.predecessor = before and weakref.proxy(before)  # a cycle would be garbage of each step
        self.successor: ReadyQueue | None = None
        self.states = bytearray(len(tasks))
        self.ready, self.lowest = 0, -1
        if by is ReadyBy.BEGINNING:
            self.states = bytearray([READY]) * len(tasks)
            self.ready, self.lowest = len(tasks), 0

    def make_ready(self, microbatch: int) -> Task:
        """Note that a waiting task can run; the task."""
        self.states[microbatch] = READY
        self.ready += 1
        if self.lowest < 0 or microbatch < self.lowest:
            self.lowest = microbatch
        return self.tasks[microbatch]

    def leave(self, microbatch: int, state: int) -> None:
        """Note that a task is no longer ready, but in another state."""
        self.states[microbatch] = state
        self.ready -= 1
        if microbatch == self.lowest:
            self.lowest = self.states.find(READY, microbatch + 1) if self.ready else -1

    def __iter__(self) -> Iterator[Task]:
        """The ready tasks, the lowest microbatch first."""
        at = self.lowest
        while at >= 0:
            yield self.tasks[at]
            at = self.states.find(READY, at + 1)


class Progress:
    """The states of one stage's tasks, in rows by kind or direction, and chunk."""

    def __init__(self, own: StageTasks) -> None:
        self._chunks, self._microbatches, self._forward_only = own.chunks, own.microbatches, own.forward_only
        self.all_rows: list[ReadyQueue] = []
        for tasks, by, mixed in own.rows:
            earlier = len(self.all_rows) - own.chunks
            before = self.all_rows[earlier] if earlier >= 0 else None
            self.all_rows.append(row := ReadyQueue(tasks, by, mixed, before))
            if before is not None and by is ReadyBy.PREDECESSOR and not own.forward_only:
                before.successor = row
        first, rest = self.all_rows[: own.chunks], self.all_rows[own.chunks :]
        forwards, backwards, weights = first, rest[: own.chunks], rest[own.chunks :]
        self.rows = forwards, backwards, backwards, weights  # by kind; a direction has the number of one
        # Best first by the paper's tie order: the lowest chunk's forwards, of the others the highest chunk's.
        self.ranked = forwards, backwards[::-1], (), weights[::-1]  # by direction

    def state(self, task: Task) -> int:
        """WAITING, READY or DISPATCHED; WAITING for a B that is an I here, and for an I that is a B."""
        row = self.rows[task.kind][task.chunk]
        return row.states[task.microbatch] if row.tasks[task.microbatch] == task else WAITING

    def __contains__(self, task: Task) -> bool:
        known = 0 <= task.chunk < self._chunks and 0 <= task.microbatch < self._microbatches
        return known and self.rows[task.kind][task.chunk].tasks[task.microbatch] == task

    def arrive(self, arrived: Input) -> str | None:
        """File the arrival of an input; what was expected instead, if it cannot happen now."""
        expected = self.refusal(arrived)
        if expected is None:
            direction, chunk, microbatch = arrived
            self.rows[direction][chunk].make_ready(microbatch)
        return expected

    def recall(self, foreseen: Input) -> None:
        """Take an arrival back whose task has not been dispatched."""
        direction, chunk, microbatch = foreseen
        self.rows[direction][chunk].leave(microbatch, WAITING)

    def refusal(self, arrived: Input, coming: Task | None = None) -> str | None:
        """What is expected instead of an arrival that cannot happen now, nor after the dispatch of a task."""
        direction, chunk, microbatch = arrived
        if not (0 <= chunk < self._chunks and 0 <= microbatch < self._microbatches):
            return f"chunk < {self._chunks} and microbatch < {self._microbatches}"
        row = self.rows[direction][chunk]
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
        row = self.rows[kind][chunk]
        row.leave(microbatch, DISPATCHED)
        if row.successor is None or CHARGES[kind] < 0:  # a B or W is the last of its chunk
            return ()
        return (row.successor.make_ready(microbatch),)

    def ready_tasks(self) -> list[Task]:
        """The ready tasks in tie order: forwards, then backwards, then weight gradients."""
        return [task for rows in self.ranked for row in rows for task in row]

    def missing(self) -> list[Task]:
        """The tasks whose inputs have not arrived, though nothing on this stage stands in their way."""
        rows = self.all_rows[: self._chunks * (1 if self._forward_only else 2)]
        return [
            task
            for row in rows
            for j, task in enumerate(row.tasks)
            if row.states[j] == WAITING
            and (row.predecessor is None or row.predecessor.states[j] == DISPATCHED)
        ]
