"""Hints: they rank what is runnable. Under a hint a stage does not idle while a task is runnable.

A hint is a frozen object with two pure methods: `start` gives its state at the beginning of a step, and
`choose(state, ready)` gives the task to run and the state after it, or None. `ready` is a view of the stage
that only answers questions: for the best runnable task of a direction, or about a given task. A task that is
not runnable now is not in it, so a hint cannot wait for one.

Two may choose nothing though a task is runnable (`Hint.waits`): a ranking that reserves (`ranked.py`; it
never holds back the stage's lowest unfinished microbatch), and the drain (`Drain`, below).

Within a direction, ties go as in the paper's appendix A: forward the lowest chunk first, backward the
highest, then the lowest microbatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Direction, Placement, Task

DIRECTIONS = tuple(Direction)


class HintView(Protocol):
    """The tasks that may be dispatched now: ready, admitted, and with a place for their gradient."""

    def first(self, direction: Direction) -> Task | None:
        """The best runnable task of a direction in tie order, or None."""

    def runnable(self, direction: Direction) -> Iterator[Task]:
        """All runnable tasks of a direction in tie order."""

    def heads(self, rank: Mapping[Task, int]) -> Iterator[Task]:
        """The lowest runnable task of every direction and chunk, by rank."""

    def was_dispatched(self, task: Task) -> bool:
        """Whether a task of this stage is past."""

    def past(self, order: Sequence[Task], at: int) -> int:
        """Where the first task of an order stands, from `at` on, that is not past; its length without one."""

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        """Whether, by the limits, a part of an order could follow if a runnable F were dispatched before it.

        The part is what is not past of its tasks from `start` to before `stop`; I's are in nobody's way. True
        for the stage's lowest unfinished microbatch in any case: if that waited, stages could wait for each
        other for ever.
        """

    def __contains__(self, task: Task) -> bool: ...


@dataclass(frozen=True)
class Only:
    """Some of a stage's runnable tasks, as if there were no others."""

    ready: HintView
    wanted: Callable[[Task], bool]

    def first(self, direction: Direction) -> Task | None:
        return next(self.runnable(direction), None)

    def runnable(self, direction: Direction) -> Iterator[Task]:
        return filter(self.wanted, self.ready.runnable(direction))

    def heads(self, rank: Mapping[Task, int]) -> Iterator[Task]:
        lowest: dict[tuple[Direction, int], Task] = {}
        for direction in DIRECTIONS:
            for task in self.runnable(direction):
                lowest.setdefault((direction, task.chunk), task)
        return iter(sorted(lowest.values(), key=rank.__getitem__))

    def was_dispatched(self, task: Task) -> bool:
        return self.ready.was_dispatched(task)

    def past(self, order: Sequence[Task], at: int) -> int:
        return self.ready.past(order, at)

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        return self.ready.leaves_room(task, order, start, stop)

    def __contains__(self, task: Task) -> bool:
        return self.wanted(task) and task in self.ready


class Hint(ABC):
    """Readiness first: the schedule ranks the runnable tasks, and one of them runs (but see `waits`)."""

    @property
    def waits(self) -> bool:
        """Whether it may choose nothing though a task is runnable; only hints that save memory may."""
        return False

    @property
    def by_chunk(self) -> bool:
        """Whether it is charged by chunk, as it keeps room for what it needs next (`admission.py`)."""
        return False

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        """Where it runs with so many chunks a stage: any placement will do, so the plain one."""
        return Placement(stages, chunks)

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        """The (chunk, microbatch) of a stage whose backward runs as I and W instead of as B."""
        return ()

    def start(self, stage: int, placement: Placement, microbatches: int) -> Any:
        """The hint's state at the beginning of a stage's step: any immutable value."""
        return None

    @abstractmethod
    def choose(self, state: Any, ready: HintView) -> tuple[Task, Any] | None:
        """The task to run now and the state after it; None if nothing is runnable (but see `waits`)."""


@dataclass(frozen=True)
class _Rounds(Hint):
    """Rounds of one runnable task of each of two directions; with one of them runnable, that one."""

    first: Direction
    second: Direction

    def start(self, stage: int, placement: Placement, microbatches: int) -> Direction:
        """The direction whose turn it is."""
        return self.first

    def choose(self, state: Direction, ready: HintView) -> tuple[Task, Direction] | None:
        """The direction whose turn it is if it has a runnable task, else the other one."""
        other = self.second if state is self.first else self.first
        if (task := ready.first(state)) is not None:
            return task, other
        if (task := ready.first(other)) is not None:
            return task, state
        return None


@dataclass(frozen=True)
class BF(_Rounds):
    """Rounds of one runnable B, then one F; with one direction runnable, that one (paper, section 5)."""

    first: Direction = Direction.BACKWARD
    second: Direction = Direction.FORWARD


@dataclass(frozen=True)
class FB(_Rounds):
    """Rounds of one runnable F, then one runnable B (paper, Table 7)."""

    first: Direction = Direction.FORWARD
    second: Direction = Direction.BACKWARD


@dataclass(frozen=True)
class BFW(BF):
    """As BF, the backward split; when no B, I or F is runnable one W, then a new round (paper, section 5).

    The first virtual stage, for whose input gradient nobody waits, runs the fused backward, ranked as B.
    """

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        """Everywhere but at the beginning of the model."""
        chunks = [c for c in range(placement.chunks) if placement.virtual_stage(stage, c) > 0]
        return [(c, j) for c in chunks for j in range(microbatches)]

    def choose(self, state: Direction, ready: HintView) -> tuple[Task, Direction] | None:
        """B and F in turns, else W."""
        choice = super().choose(state, ready)
        if choice is None and (task := ready.first(Direction.WEIGHT)) is not None:
            return task, self.first
        return choice


@dataclass(frozen=True)
class _Priority(Hint):
    """Always the first direction of a list that has a runnable task."""

    directions: tuple[Direction, ...]

    def choose(self, state: None, ready: HintView) -> tuple[Task, None] | None:
        """By direction, then in tie order."""
        for direction in self.directions:
            if (task := ready.first(direction)) is not None:
                return task, None
        return None


@dataclass(frozen=True)
class BPriority(_Priority):
    """A runnable B before any F (paper, Table 7)."""

    directions: tuple[Direction, ...] = (Direction.BACKWARD, Direction.FORWARD)


@dataclass(frozen=True)
class FPriority(_Priority):
    """A runnable F before any B (paper, Table 7)."""

    directions: tuple[Direction, ...] = (Direction.FORWARD, Direction.BACKWARD)


class DrainState(NamedTuple):
    """The hint's own state, how many forwards have no backward, and the order to drain in from here on."""

    inner: Any
    held: int
    order: tuple[Task, ...]


@dataclass(frozen=True)
class Drain(Hint):
    """A hint that is overruled while a stage holds too much.

    Raises:
        ValueError: a limit below 1.
    """

    hint: Hint
    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}: a stage must be able to hold one microbatch")

    @property
    def waits(self) -> bool:
        """Yes: several chunks wait for the next task of their order."""
        return True

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        """As the hint."""
        return self.hint.split(stage, placement, microbatches)

    def start(self, stage: int, placement: Placement, microbatches: int) -> DrainState:
        """With nothing held; one chunk needs no order."""
        order: list[Task] = []
        if placement.chunks > 1:
            split = set(self.split(stage, placement, microbatches))
            for j in range(microbatches):
                order += [Task(FORWARD, c, j) for c in range(placement.chunks)]
                for c in reversed(range(placement.chunks)):
                    kinds = KINDS[BACKWARD].parts if (c, j) in split else (BACKWARD,)
                    order += [Task(kind, c, j) for kind in kinds]
        return DrainState(self.hint.start(stage, placement, microbatches), 0, tuple(order))

    def choose(self, state: DrainState, ready: HintView) -> tuple[Task, DrainState] | None:
        """As the hint below the limit; at it, what drains."""
        inner, held, order = state
        if held < self.limit:
            choice = self.hint.choose(inner, ready)
        elif not order:
            choice = self.hint.choose(inner, Only(ready, lambda task: KINDS[task.kind].charge <= 0))
        else:
            order = order[next(at for at, task in enumerate(order) if not ready.was_dispatched(task)) :]
            choice = (order[0], inner) if order[0] in ready else None
        if choice is None:
            return None
        task, inner = choice
        return task, DrainState(inner, held + KINDS[task.kind].charge, order)
