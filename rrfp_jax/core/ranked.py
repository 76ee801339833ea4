"""Readiness first by a fixed order: the order ranks what is runnable, and reserves the memory that it needs.

Whatever runs ahead of the order takes room, and without a reserve that may be the room of what the order has
next. So an F that is not next in the order runs only if

    what the order has from its first task that is not past up to that F, and at least up to the stage's
    first B or W, would still fit beside it,

each F charged and each B or W freed in turn, or if it belongs to the stage's lowest unfinished microbatch.
I, B and W need no room, so the reserve never holds them back. Where there is no limit, nothing is reserved.

Why up to the first B or W: until then a stage runs forwards until it is full, and waits. An F of the warm-up
that runs ahead of the order does not get another one in; it only makes the order's next F wait. In a V that
is the first microbatch on its way back, for which all stages wait, and every stage would make it later. So
within the warm-up an F runs ahead only where one more like it would fit beside all of the warm-up.

If the order has the tasks of each kind and chunk in microbatch order, as usual, then of each chunk only the
lowest admitted F may run ahead. Where that is held back, no higher one of the chunk is tried.

The exception is what keeps stages from waiting for each other, also where the order itself does not fit the
limit: by admission (`admission.py`), the tasks of the step's lowest unfinished microbatch can always run, and
on every stage that has not finished it that microbatch is the lowest unfinished one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress

from rrfp_jax.core.hints import DIRECTIONS, Hint, HintView
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.tasks import CHARGES, KINDS, WEIGHT, Placement, Task


@dataclass(frozen=True)
class _Line:
    """A stage's order, and what follows from it (`_Line.of`)."""

    order: tuple[Task, ...]
    rank: Mapping[Task, int] = field(compare=False, repr=False)
    ascending: bool = field(compare=False)
    charges: Sequence[Task] = field(compare=False, repr=False)
    before: Sequence[int] = field(compare=False, repr=False)  # by place, how many of the charges before it
    full: int = field(compare=False, repr=False)  # the place of the first task that frees: the warm-up ends

    @classmethod
    def of(cls, order: Sequence[Task]) -> _Line:
        """With what follows from the order."""
        counted = [CHARGES[task.kind] != 0 for task in order]
        return cls(
            order=tuple(order),
            rank={task: at for at, task in enumerate(order)},
            ascending=_ascends(order),
            charges=list(compress(order, counted)),
            before=list(accumulate(counted, initial=0)),
            full=next((at for at, task in enumerate(order) if CHARGES[task.kind] < 0), len(order)),
        )


class _Place(tuple[int, _Line]):
    """How many tasks of an order are past, from its beginning on, and the order.

    The number follows from what was dispatched, so it tells no states apart.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self[1] == other[1]

    def __hash__(self) -> int:
        return hash(self[1])


_new = tuple.__new__  # a class's own takes longer, and there is one a task


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

    def start(self, stage: int, placement: Placement, microbatches: int) -> _Place:
        """At the beginning of the stage's order."""
        return _Place((0, _Line.of(self.order.order(stage, placement, microbatches))))

    def choose(self, state: _Place, ready: HintView) -> tuple[Task, _Place] | None:
        """The runnable task that comes first in the order, unless it takes what the order needs before it."""
        at, line = state
        order, rank = line.order, line.rank
        at = ready.past(order, at)
        if at < len(order) and (task := order[at]) in ready:
            return task, _new(_Place, (at + 1, line))
        for task in ready.heads(rank) if line.ascending else _by_rank(line, ready):
            if self.reserve and CHARGES[task.kind] > 0:
                before, stop = line.before, max(rank[task], line.full)
                if not ready.leaves_room(task, line.charges, before[at], before[stop]):
                    continue
            return task, _new(_Place, (at, line))
        return None


def _by_rank(line: _Line, ready: HintView) -> list[Task]:
    """All that can run: where a kind does not go by microbatch, the lowest need not come first."""
    tasks = [task for direction in DIRECTIONS for task in ready.runnable(direction)]
    return sorted(tasks, key=line.rank.__getitem__)


def _ascends(order: Sequence[Task]) -> bool:
    latest: dict[tuple[int, int], int] = {}
    for kind, chunk, microbatch in order:
        place = KINDS[kind].direction, chunk
        if latest.get(place, -1) > microbatch:
            return False
        latest[place] = microbatch
    return True
