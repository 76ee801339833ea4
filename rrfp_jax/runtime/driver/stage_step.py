"""What the driver asks of a stage: a model's (`stages/model_step`), or one that only takes its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import jax

from rrfp_jax.core.memory.meter import Meter
from rrfp_jax.core.tasks import Task

Arrays: TypeAlias = Sequence[jax.Array]


class StageStep(Protocol):
    """A stage's part in one step, as the driver drives it."""

    phase: str
    buckets: Sequence[int]  # number of each microbatch's bucket in this step
    shapes: Sequence[int]  # its number among those of all steps
    meter: Meter  # told by the driver

    def receive(self, task: Task, arrays: Arrays) -> None:
        """File the input of a task that has arrived: what this process's devices have of it."""

    def run(self, task: Task, in_turn: bool) -> tuple[Arrays, jax.Array | None]:
        """Dispatch a task.

        Args:
            task: to be run.
            in_turn: whether the gradients that it computes are the next to be added; else they are parked.

        Returns:
            What to send to another virtual stage, as far as this process's devices have it, see
            `StageMesh.shards`; and an array that is ready when it has ended.
        """

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """Add the gradients of a chunk that have been parked for a microbatch."""
