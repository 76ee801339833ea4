"""The paper's own limit on what is in flight (appendix C.2), as a hint: for comparison with admission.

    rrfp_jax.Trainer(..., schedule=Drain(BF(), limit=4), settings=Settings(max_in_flight=microbatches))

Admission applies as well, so its limit is set out of the way. Only for training: in a step of forwards alone
nothing drains.

With one chunk a stage runs no forward while it holds as many microbatches as the limit. With several it then
runs one microbatch after another, waiting for each task, and may exceed the limit by the number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp_jax.core.hints import DIRECTIONS, Hint, HintView
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Direction, Placement, Task


class DrainState(NamedTuple):
    """The hint's own state, how many forwards have no backward, and the order to drain in from here on."""

    inner: Any
    held: int
    order: tuple[Task, ...]


@dataclass(frozen=True)
class Only:
    """Some of a stage's runnable tasks, as if there were no others; see `HintView`."""

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

    def past(self, order: Sequence[Task], at: int) -> int:
        return self.ready.past(order, at)

    def leaves_room(self, task: Task, order: Sequence[Task], start: int, stop: int) -> bool:
        return self.ready.leaves_room(task, order, start, stop)

    def __contains__(self, task: Task) -> bool:
        return self.wanted(task) and task in self.ready


@dataclass(frozen=True)
class Drain(Hint):
    """A hint that is overruled while a stage has as many forwards without a backward as the limit, or more.

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
            order = order[ready.past(order, 0) :]
            choice = (order[0], inner) if order[0] in ready else None
        if choice is None:
            return None
        task, inner = choice
        return task, DrainState(inner, held + KINDS[task.kind].charge, order)
