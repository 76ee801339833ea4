"""Costs with a disturbance, such as jitter, added to other costs. They wrap one another.

Random numbers are drawn per (seed, task), never in the order of the calls. So two schedules that are compared
under one seed meet the same disturbances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rrfp_jax.core.tasks import Task
from rrfp_jax.trace.costs import StepCosts
from rrfp_jax.trace.jitter import Jitter, Level


@dataclass(frozen=True)
class Disturbed(StepCosts):
    """Other costs, unchanged."""

    inner: StepCosts

    def duration(self, stage: int, task: Task) -> float:
        return self.inner.duration(stage, task)

    def transfer(self, stage: int, task: Task) -> float:
        return self.inner.transfer(stage, task)

    def occupancy(self, stage: int, task: Task) -> float:
        return self.inner.occupancy(stage, task)


@dataclass(frozen=True)
class Jittered(Disturbed):
    """Injected jitter, as the runtime applies it on paced devices (trace/jitter.py; paper, 7.6).

    For one simulation: delays depend on what was asked before.
    """

    level: Level
    seed: int
    step: int = 0

    @cached_property
    def _jitter(self) -> Jitter:
        return Jitter(self.level, self.seed)

    def duration(self, stage: int, task: Task) -> float:
        """See `StepCosts.duration`; depends on the running mean of what was asked before."""
        own = self.inner.duration(stage, task)
        return own + self._jitter.delay(self.step, stage, task, own)
