"""Readiness first by a fixed order: the order ranks what is runnable, and reserves the memory that it needs.

Whatever runs ahead of the order takes room, and without a reserve that may be the room of what the order has
next. So an F that is not next in the order runs only if

    what the order has from its first task that is not past up to that F would still fit beside it,

each F charged and each B or W freed in turn, or if it belongs to the stage's lowest unfinished microbatch.
I, B and W need no room, so the reserve never holds them back. Where there is no limit, nothing is reserved.

If the order has the tasks of each kind and chunk in microbatch order, as usual, then of each chunk only the
lowest admitted F may run ahead. Where that is held back, no higher one of the chunk is tried.

The exception is what keeps stages from waiting for each other, also where the order itself does not fit the
limit: by admission (`admission.py`), the tasks of the step's lowest unfinished microbatch can always run, and
on every stage that has not finished it that microbatch is the lowest unfinished one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rrfp_jax.core.hints import DIRECTIONS, Hint, HintView
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.tasks import FORWARD, WEIGHT, Placement, Task


@dataclass(frozen=True)
class _Line:
    """A stage's order, and how far it is.

    Attributes:
        order: all of its tasks.
        rank: where each task stands.
        ascending: whether the tasks of every kind and chunk are in microbatch order.
        at: all before are past. Follows from what was dispatched, so it tells no states apart.
    """

    order: tuple[Task, ...]
    rank: Mapping[Task, int] = field(compare=False, repr=False)
    ascending: bool = field(compare=False)
    at: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Ranked(Hint):
    """Any fixed order as a ranking: the first of its tasks that is runnable (paper, section 5).

    Attributes:
        order: any; with its placement.
        reserve: whether an F may run ahead only where the order keeps its room.
    """

    order: FixedOrder
    reserve: bool = True

    @property
    def waits(self) -> bool:
        """Rather than that the order loses its room."""
        return self.reserve

    @property
    def by_chunk(self) -> bool:
        """As it keeps the order's room."""
        return self.reserve

    def placement_for(self, stages: int, chunks: int = 1) -> Placement:
        """The order's."""
        return self.order.placement_for(stages, chunks)

    def split(self, stage: int, placement: Placement, microbatches: int) -> Collection[tuple[int, int]]:
        """Where the order names a W."""
        tasks = self.order.order(stage, placement, microbatches)
        return {(task.chunk, task.microbatch) for task in tasks if task.kind is WEIGHT}

    def start(self, stage: int, placement: Placement, microbatches: int) -> _Line:
        """At the beginning of the stage's order."""
        order = tuple(self.order.order(stage, placement, microbatches))
        return _Line(order, {task: at for at, task in enumerate(order)}, _ascends(order))

    def choose(self, state: _Line, ready: HintView) -> tuple[Task, _Line] | None:
        """The runnable task that comes first in the order, unless it takes what the order needs before it."""
        order, rank, at = state.order, state.rank, state.at
        while at < len(order) and ready.was_dispatched(order[at]):
            at += 1
        if at < len(order) and order[at] in ready:
            return order[at], _Line(order, rank, state.ascending, at + 1)
        ahead: list[Task] = []  # of the order, up to the task that is looked at
        seen = at
        for task in sorted(_candidates(state, ready), key=rank.__getitem__):
            if self.reserve and task.kind is FORWARD:
                ahead += [other for other in order[seen : rank[task]] if not ready.was_dispatched(other)]
                seen = rank[task]
                if ahead and not ready.leaves_room(task, ahead):
                    continue
            return task, _Line(order, rank, state.ascending, at)
        return None


def _candidates(line: _Line, ready: HintView) -> Collection[Task]:
    """What may come first: if each kind goes by microbatch, the lowest of each will do."""
    if line.ascending:
        return list(ready.heads())
    return [task for direction in DIRECTIONS for task in ready.runnable(direction)]


def _ascends(order: Sequence[Task]) -> bool:
    latest: dict[tuple[int, int], int] = {}
    for kind, chunk, microbatch in order:
        if latest.get((kind.direction, chunk), -1) > microbatch:
            return False
        latest[kind.direction, chunk] = microbatch
    return True
