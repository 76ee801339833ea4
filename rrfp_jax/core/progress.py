"""How far a stage is in its step: the state of each of its tasks, by the dependency rules.

    WAITING --(input arrived / own predecessor dispatched)--> READY --(dispatched)--> DISPATCHED

  task              is ready when
  F, first virtual  at once: its input is data
  F, elsewhere      its activation has arrived
  B or I, last      its own F has been dispatched (the device is in order)
  B or I, else      its gradient has arrived (so its own F was dispatched long before)
  W                 its own I has been dispatched

Tasks are filed in *rows*, one for each direction and chunk. A chunk's B or I of a microbatch, whichever it
has, is in the row of BACKWARD. A row has one byte per microbatch, so the lowest ready one is found by a
search for a byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Direction, Input, Kind, Placement, Task

WAITING, READY, DISPATCHED = range(3)

Names = Mapping[Kind, Sequence[Sequence[Task]]]
"""`[kind][chunk][microbatch]`: all tasks that there may be in a step."""


def all_tasks(chunks: int, microbatches: int) -> Names:
    """Every task of every kind, made once for all stages, as making one takes long beside looking it up."""
    return {kind: [[Task(kind, c, j) for j in range(microbatches)] for c in range(chunks)] for kind in Kind}


class Row:
    """The tasks of one direction and chunk by microbatch.

    Attributes:
        tasks: by microbatch, as they are called on this stage.
        states: by microbatch, WAITING, READY or DISPATCHED.
        first: the ready task of the lowest microbatch, or None.
        arrives: whether their inputs come from another virtual stage.
        mixed: whether both B's and I's are among them.
    """

    __slots__ = ("arrives", "first", "mixed", "states", "tasks")

    def __init__(self, tasks: Sequence[Task], arrives: bool, mixed: bool = False) -> None:
        self.tasks = tasks
        self.arrives = arrives
        self.states = bytearray(len(tasks))
        self.first: Task | None = None
        self.mixed = mixed

    def make_ready(self, microbatch: int) -> None:
        """Note that a waiting task can run."""
        self.states[microbatch] = READY
        if self.first is None or microbatch < self.first.microbatch:
            self.first = self.tasks[microbatch]

    def dispatch(self, microbatch: int) -> None:
        """Note that a ready task runs."""
        self.states[microbatch] = DISPATCHED
        if self.first is not None and microbatch == self.first.microbatch:
            following = self.states.find(READY, microbatch + 1)
            self.first = self.tasks[following] if following >= 0 else None

    def __iter__(self) -> Iterator[Task]:
        """The ready tasks, the lowest microbatch first."""
        at = -1 if self.first is None else self.first.microbatch
        while at >= 0:
            yield self.tasks[at]
            at = self.states.find(READY, at + 1)


class Progress:
    """The states of one stage's tasks.

    Attributes:
        forwards, backwards, weights: their rows by chunk.
        ranked: the same by direction, the best chunk first.
        splits: how many backwards run as I and W.

    Args:
        stage: which.
        placement: of the step.
        names: of the step (`all_tasks`).
        split: the (chunk, microbatch) whose backward runs as I and W.
        forward_only: there is no backward.
    """

    def __init__(
        self,
        stage: int,
        placement: Placement,
        names: Names,
        split: Collection[tuple[int, int]],
        forward_only: bool,
    ) -> None:
        backwards, splits = [list(tasks) for tasks in names[BACKWARD]], [0] * placement.chunks
        for chunk, microbatch in split:
            splits[chunk] += backwards[chunk][microbatch].kind is BACKWARD
            backwards[chunk][microbatch] = names[INPUT][chunk][microbatch]
        self.splits = sum(splits)
        self.forwards = [Row(tasks, placement.needs_arrival(stage, tasks[0])) for tasks in names[FORWARD]]
        self.backwards = [
            Row(tasks, placement.needs_arrival(stage, tasks[0]), mixed=0 < count < len(tasks))
            for tasks, count in zip(backwards, splits, strict=True)
        ]
        self.weights = [Row(tasks, False) for tasks in names[WEIGHT]]
        self.ranked = {  # best chunk first, by the paper's tie order (appendix A)
            Direction.FORWARD: self.forwards,
            Direction.BACKWARD: self.backwards[::-1],
            Direction.WEIGHT: self.weights[::-1],
        }
        self._of = {
            Direction.FORWARD: self.forwards,
            Direction.BACKWARD: self.backwards,
            Direction.WEIGHT: self.weights,
        }
        self._rows = {
            FORWARD: self.forwards,
            BACKWARD: self.backwards,
            INPUT: self.backwards,
            WEIGHT: self.weights,
        }
        self._chunks, self._microbatches = placement.chunks, len(names[FORWARD][0])
        self._forward_only = forward_only
        if not self.forwards[0].arrives:
            for j in reversed(range(self._microbatches)):
                self.forwards[0].make_ready(j)

    def state(self, task: Task) -> int:
        """WAITING, READY or DISPATCHED; WAITING for a B that is an I here, and for an I that is a B."""
        row = self._rows[task.kind][task.chunk]
        return row.states[task.microbatch] if row.tasks[task.microbatch] == task else WAITING

    def __contains__(self, task: Task) -> bool:
        known = 0 <= task.chunk < self._chunks and 0 <= task.microbatch < self._microbatches
        return known and self._rows[task.kind][task.chunk].tasks[task.microbatch] == task

    def key(self) -> bytes:
        """The states of all tasks; two stages that differ in nothing else are as far as each other."""
        return b"".join(row.states for row in chain(self.forwards, self.backwards, self.weights))

    def task_for(self, direction: Direction, chunk: int, microbatch: int) -> Task:
        """The task that runs here for a direction: for BACKWARD, B or I."""
        return self._of[direction][chunk].tasks[microbatch]

    def arrive(self, arrived: Input) -> str | None:
        """File the arrival of an input; what was expected instead, if it cannot happen now."""
        direction, chunk, microbatch = arrived
        if not (0 <= chunk < self._chunks and 0 <= microbatch < self._microbatches):
            return f"chunk < {self._chunks} and microbatch < {self._microbatches}"
        row = self._of[direction][chunk]
        if not row.arrives:
            return "F or B whose input comes from another virtual stage"
        if row.states[microbatch] != WAITING:
            return "each input once"
        if direction is Direction.BACKWARD:
            if self.forwards[chunk].states[microbatch] != DISPATCHED:
                return "a gradient only after the microbatch's own forward"
            if self._forward_only:
                return "no gradient in a forward-only pass"
        row.make_ready(microbatch)
        return None

    def dispatch(self, task: Task) -> None:
        """Note that a ready task runs, and what becomes ready by that on this stage."""
        kind, chunk, microbatch = task
        row = self._rows[kind][chunk]
        row.dispatch(microbatch)
        if kind is FORWARD:
            if not self.backwards[chunk].arrives and not self._forward_only:
                self.backwards[chunk].make_ready(microbatch)
        elif kind is INPUT:
            self.weights[chunk].make_ready(microbatch)

    def ready_tasks(self) -> list[Task]:
        """The ready tasks in tie order: forwards, then backwards, then weight gradients."""
        return [task for rows in self.ranked.values() for row in rows for task in row]

    def missing(self) -> list[Task]:
        """The tasks whose inputs have not arrived, though nothing on this stage stands in their way."""
        found = [task for row in self.forwards for task in row.tasks if self.state(task) == WAITING]
        if self._forward_only:
            return found
        return found + [
            task
            for forward, row in zip(self.forwards, self.backwards, strict=True)
            for j, task in enumerate(row.tasks)
            if forward.states[j] == DISPATCHED and row.states[j] == WAITING
        ]

    def check_invariants(self) -> None:
        """Assert what must hold at any time (for tests; costs a pass over all tasks)."""
        for row in chain(self.forwards, self.backwards, self.weights):
            ready = [task for task, state in zip(row.tasks, row.states, strict=True) if state == READY]
            assert list(row) == ready
            assert row.first == next(iter(ready), None)
        for forward, backward, weight in zip(self.forwards, self.backwards, self.weights, strict=True):
            for j, task in enumerate(backward.tasks):
                assert backward.states[j] == WAITING or forward.states[j] == DISPATCHED, "B before its F"
                halfway = task.kind is INPUT and backward.states[j] == DISPATCHED
                assert halfway == (weight.states[j] != WAITING), "W is ready when its I is dispatched"
