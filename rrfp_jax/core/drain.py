"""The paper's backpressure (App. C.2), for comparison with admission.

A stage counts its forwards less its backwards, over all its chunks. While there are `limit` of them,

    with one chunk        it runs no forward, but whatever else its hint chooses;
    with several chunks   it finishes one microbatch after the other, the lowest first, each in the order
                          F0 .. F(C-1), B(C-1) .. B0, and *waits* for the next task of that order.

The second makes stages wait, and may exceed the limit by the number of chunks. A backward counts where the
microbatch is released: at B, or at W, which follows its I in the order above. The paper leaves open what a W
means for its limit. Counting from I on would not bound what W still needs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp_jax.core.hints import Hint, HintView, Only
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task

HELD = {FORWARD: 1, BACKWARD: -1, INPUT: 0, WEIGHT: -1}
"""What a dispatched task adds to the forwards without a backward."""


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
                    kinds = (INPUT, WEIGHT) if (c, j) in split else (BACKWARD,)
                    order += [Task(kind, c, j) for kind in kinds]
        return DrainState(self.hint.start(stage, placement, microbatches), 0, tuple(order))

    def choose(self, state: DrainState, ready: HintView) -> tuple[Task, DrainState] | None:
        """As the hint below the limit; at it, what drains."""
        inner, held, order = state
        if held < self.limit:
            choice = self.hint.choose(inner, ready)
        elif not order:
            choice = self.hint.choose(inner, Only(ready, lambda task: task.kind is not FORWARD))
        else:
            order = order[next(at for at, task in enumerate(order) if not ready.was_dispatched(task)) :]
            choice = (order[0], inner) if order[0] in ready else None
        if choice is None:
            return None
        task, inner = choice
        return task, DrainState(inner, held + HELD[task.kind], order)
