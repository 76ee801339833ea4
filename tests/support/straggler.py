"""A stage that is slow for a while, in simulated steps."""

import math
from dataclasses import dataclass

from rrfp_jax.core.tasks import Task
from rrfp_jax.sim.disturbances import Disturbed


@dataclass(frozen=True)
class Straggler(Disturbed):
    """One stage takes `factor` times as long, from microbatch `first` to `last` (None: to the end)."""

    stage: int
    factor: float
    first: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.factor < math.inf:
            raise ValueError(
                f"factor={self.factor}: give a multiple of the usual time, finite and at least 0"
            )

    def duration(self, stage: int, task: Task) -> float:
        seconds = self.inner.duration(stage, task)
        last = task.microbatch if self.last is None else self.last
        slow = stage == self.stage and self.first <= task.microbatch <= last
        return seconds * self.factor if slow else seconds
