"""What a step's stages agree on, and what one of them may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rrfp_jax.core.accumulation import Accumulation
from rrfp_jax.core.progress import Names, all_tasks
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.tasks import Placement


@dataclass(frozen=True)
class Budget:
    """What a stage may hold in bytes: `costs` per microbatch, of all its chunks there, and their limit."""

    costs: Sequence[int]
    limit: int


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What all stages of a step agree on.

    Attributes:
        limit: most microbatches in flight on a stage under a hint; None for no limit.
        spare_gradients: gradients that may be parked on a stage until their turn comes.
        forward_only: evaluation: no backward; a microbatch leaves when its forward is dispatched.

    Raises:
        ValueError: no microbatches.
    """

    placement: Placement
    microbatches: int
    schedule: Schedule
    limit: int | None = None
    accumulation: Accumulation = "index"
    spare_gradients: int = 2
    forward_only: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches={self.microbatches}: a step needs at least one")

    @cached_property
    def names(self) -> Names:
        """All tasks that there may be in the step."""
        return all_tasks(self.placement.chunks, self.microbatches)
