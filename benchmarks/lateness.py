"""Costs with arrivals that are noticed late:

LateReadiness(Jittered(costs, LEVELS["J2"], seed=0), seconds=1e-3)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rrfp_jax.core.tasks import Task
from rrfp_jax.studies.disturbances import Disturbed


@dataclass(frozen=True)
class LateReadiness(Disturbed):
    """Every arrival is noticed so many seconds later; the link is free by then."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"late readiness={self.seconds}: give seconds, finite and at least 0")

    def transfer(self, stage: int, task: Task) -> float:
        return self.inner.transfer(stage, task) + self.seconds
