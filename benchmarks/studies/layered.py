"""What tasks cost where layers have times of their own, and stages are slow, under any split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.trace.costs import StepCosts
from rrfp_jax.trace.layers import Work


@dataclass(frozen=True)
class LayeredCosts(StepCosts):
    """A model cut by a split.

    Attributes:
        work: the layers and the split.
        seconds: by layer, of its forward.
        slowness: by stage, how many times as long everything takes there.
        placement: of the virtual stages.
        backward_ratio: a fused backward takes so many times as long as the forward; I and W half each.
        transfer_seconds: of every transfer.
    """

    work: Work
    seconds: Sequence[float]
    slowness: Sequence[float]
    placement: Placement
    backward_ratio: float = 2.0
    transfer_seconds: float = 0.0

    @cached_property
    def forward(self) -> list[float]:
        """By virtual stage (s)."""
        stages = [self.placement.place(v)[0] for v in range(self.placement.last + 1)]
        return [
            self.slowness[stage] * sum(self.seconds[i] for i in layers)
            for stage, layers in zip(stages, self.work.ranges(), strict=True)
        ]

    def duration(self, stage: int, task: Task) -> float:
        """See `StepCosts.duration`."""
        forward = self.forward[self.placement.virtual_stage(stage, task.chunk)]
        if task.kind is FORWARD:
            return forward
        return forward * self.backward_ratio / (1 if task.kind is BACKWARD else 2)

    def transfer(self, stage: int, task: Task) -> float:
        """See `StepCosts.transfer`."""
        return self.transfer_seconds
