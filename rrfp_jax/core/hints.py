"""Hints: they rank what is runnable. Under a hint a stage does not idle while a task is runnable.

A hint is a frozen object with two pure methods: `start` gives its state at the beginning of a step, and
`choose(state, ready)` the task to run and the state after it, or None. `ready` only answers questions about
tasks that can run now, so a hint cannot wait for another one. Ties within a direction go as in the paper's
appendix A: forward the lowest chunk first, backward the highest, then the lowest microbatch. Users select a
hint by its name in `NAMED` (core/schedules.py), which also makes it a candidate of the planner;
docs/extending.md has the list of what else knows the names.

`Ranked` ranks by a fixed order, and reserves the memory that the order needs: it may choose nothing though a
task is runnable (`Hint.waits`). Whatever runs ahead of the order takes room, perhaps that of what the order
has next. So an F that is not next in the order runs only if it belongs to the stage's lowest unfinished
microbatch, or if

    what the order has from its first task that is not past up to that F, and at least up to the stage's
    first B or W, would still fit beside it,

each F charged and each B or W freed in turn. Without a limit nothing is reserved. Where the order has each
chunk's microbatches in ascending order, only the lowest admitted F of a chunk is tried.

Why up to the first B or W: until then a stage runs forwards until it is full, and waits. An F of the warm-up
that runs ahead does not get another one in; it only makes the order's next F wait, which in a V is the first
microbatch on its way back, for which all stages wait.

The exception keeps stages from waiting for each other, also where the order itself does not fit the limit: by
admission, the tasks of the step's lowest unfinished microbatch can always run, and on every stage that has
not finished it that microbatch is the lowest unfinished one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress
from typing import Any, Protocol, TypeAlias

from rrfp_jax.core.orders import FixedOrder, split_of
from rrfp_jax.core.tasks import CHARGES, KINDS, Direction, Placement, Task

DIRECTIONS = tuple(Direction)


class HintView(Protocol):
    """The tasks that may be dispatched now: ready, admitted, and with a place for their gradient."""

    def first(self, direction: Direction) -> Task | None:
        """The best runnable task of a direction in tie order, or None."""

    def runnable(self, direction: Direction) -> Iterator[Task]:
        """All runnable tasks of a direction in tie order."""

    def heads(self, rank: Mapping[Task, int]) -> Iterator[Task]:
        """The lowest runnable task of every direction and chunk; `rank` has all tasks, no two alike."""

    def past(self, order: Sequence[Task], at: int) -> int:
        """Where the first task of an order stands, from `at` on, that is not past; its length without one."""

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        """Whether, by the limits, a part of an order could follow if a runnable F were dispatched before it.

        The part is what is not past of its tasks from `start` to before `stop`; I's are in nobody's way. True
        for the stage's lowest unfinished microbatch in any case: if that waited, stages could wait for each
        other for ever.
        """

    def __contains__(self, task: Task) -> bool: ...


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

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        """Whether the last virtual stage mostly runs a microbatch's B or I right after its F.

        If so, the last layers' F is part of it (`StepRules.joined`): while it waits, so does their forward.
        """
        return True

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
class BF(Hint):
    """Rounds of one runnable B, then one F; with one direction runnable, that one (paper, section 5)."""

    first: Direction = Direction.BACKWARD
    second: Direction = Direction.FORWARD

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
class FB(BF):
    """Rounds of one runnable F, then one runnable B (paper, Table 7)."""

    first: Direction = Direction.FORWARD
    second: Direction = Direction.BACKWARD


@dataclass(frozen=True)
class BFW(BF):
    """BF with the backward split; when no B, I or F is runnable one W, then a new round (paper, section 5).

    The first virtual stage, for whose input gradient nobody waits, runs the fused backward, ranked as B.
    """

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        """Everywhere but at the beginning of the model."""
        chunks = [c for c in range(placement.chunks) if placement.virtual_stage(stage, c) > 0]
        return [(c, j) for c in chunks for j in range(microbatches)]

    def choose(self, state: Direction, ready: HintView) -> tuple[Task, Direction] | None:
        choice = super().choose(state, ready)
        if choice is None and (task := ready.first(Direction.WEIGHT)) is not None:
            return task, self.first
        return choice


@dataclass(frozen=True)
class BPriority(Hint):
    """A runnable B before any F (paper, Table 7)."""

    directions: tuple[Direction, ...] = (Direction.BACKWARD, Direction.FORWARD)

    def choose(self, state: None, ready: HintView) -> tuple[Task, None] | None:
        """Always the first of the directions that has a runnable task."""
        for direction in self.directions:
            if (task := ready.first(direction)) is not None:
                return task, None
        return None


@dataclass(frozen=True)
class FPriority(BPriority):
    """A runnable F before any B (paper, Table 7)."""

    directions: tuple[Direction, ...] = (Direction.FORWARD, Direction.BACKWARD)

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        return False


class _Line:
    """A stage's order, and what follows from it."""

    def __init__(self, order: Sequence[Task]) -> None:
        counted = [CHARGES[task.kind] != 0 for task in order]
        self.order = tuple(order)
        self.rank = {task: at for at, task in enumerate(order)}
        places = defaultdict[tuple[Direction, int], list[int]](list)
        for kind, chunk, microbatch in order:
            places[KINDS[kind].direction, chunk].append(microbatch)
        self.ascending = all(own == sorted(own) for own in places.values())
        self.charges = list(compress(order, counted))
        self.before = list(accumulate(counted, initial=0))  # by place, how many of the charges before it
        # The place of the first task that frees: the warm-up ends.
        self.full = next((at for at, task in enumerate(order) if CHARGES[task.kind] < 0), len(order))


_Place: TypeAlias = tuple[int, _Line]
"""How many tasks of an order are known to be past, and the order."""


@dataclass(frozen=True)
class Ranked(Hint):
    """Any fixed order as a ranking: the first of its tasks that is runnable (paper, section 5).

    Attributes:
        order: any; with its placement.
        reserve: whether an F may run ahead only where the order keeps its room.

    Raises:
        ValueError: `order` is none.
    """

    order: FixedOrder
    reserve: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.order, FixedOrder):
            raise ValueError(f"Ranked({self.order!r}): give a fixed order, such as ZBV()")

    @property
    def waits(self) -> bool:
        """True if it reserves: an F that would take room the order needs is held back."""
        return self.reserve

    by_chunk = waits  # the room that it keeps is counted by chunk

    def turns_back(self, placement: Placement, microbatches: int) -> bool:
        return self.order.turns_back(placement, microbatches)

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        return self.order.placement_for(stages, chunks)

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        return split_of(self.order.order(stage, placement, microbatches))

    def start(self, stage: int, placement: Placement, microbatches: int) -> _Place:
        return 0, _Line(self.order.order(stage, placement, microbatches))

    def choose(self, state: _Place, ready: HintView) -> tuple[Task, _Place] | None:
        """The runnable task that comes first in the order, unless it takes what the order needs before it."""
        at, line = state
        order, rank = line.order, line.rank
        at = ready.past(order, at)
        if at < len(order) and (task := order[at]) in ready:
            return task, (at + 1, line)
        if line.ascending:
            heads: Iterable[Task] = ready.heads(rank)
        else:  # where a kind does not go by microbatch, the lowest need not come first
            heads = sorted(chain.from_iterable(map(ready.runnable, DIRECTIONS)), key=rank.__getitem__)
        for task in heads:
            if self.reserve and CHARGES[task.kind] > 0:
                before, stop = line.before, max(rank[task], line.full)
                if not ready.leaves_room(task, line.charges, before[at], before[stop]):
                    continue
            return task, (at, line)
        return None
