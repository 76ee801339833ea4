"""A step's tasks called by a plain loop: the runtime's own programs without its scheduler and driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.runtime.stage import TrainingStep


def plain_step(trainer: rrfp.Trainer, data: Sequence[Mapping[str, Any]]) -> list[jax.Array]:
    """Dispatch every task of a step, one microbatch after the other, without ever waiting.

    Args:
        trainer: started, with all stages on one device and one bucket of shapes. Its gradient sums grow.
        data: of the step.

    Returns:
        What is ready when all have ended: the losses and the gradient sums.
    """
    engine, count = trainer._engine, len(data)
    ((bucket, compiled),) = engine._compiled.items()
    inputs = engine._load(0, [bucket] * count, [compiled.train] * count, lambda j, fields: data[j])
    parts = [
        TrainingStep(stage, {0: compiled.train[s]}, [0] * count, inputs[s])
        for s, stage in engine.stages.items()
    ]
    for j in range(count):
        carry: Sequence[jax.Array] = ()
        for part in parts:
            part.receive(task := Task(FORWARD, 0, j), carry)
            carry, _ = part.run(task)
        for part in reversed(parts):
            part.receive(task := Task(BACKWARD, 0, j), carry)
            carry, _ = part.run(task)
            part.accumulate(j)
    engine._has_gradients = True  # so that the trainer's next step starts from zero
    ended: list[jax.Array] = [*parts[-1].statistics.values()]
    return ended + [leaf for stage in engine.stages.values() for leaf in jax.tree.leaves(stage.gradients)]
