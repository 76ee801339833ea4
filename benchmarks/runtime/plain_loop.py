"""A step's tasks called by a plain loop: the runtime's own programs without its scheduler and driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.runtime.stages.step import ModelStep


def load_step(trainer: rrfp.Trainer, data: Sequence[Mapping[str, Any]]) -> list[ModelStep]:
    """Every stage's part of a step, its data on the device and its sums zero.

    Args:
        trainer: started, with all stages on one device and one bucket of shapes.
        data: of the step.
    """
    engine, count = trainer._engine, len(data)
    bucket, _ = engine.library.first
    known = engine._programs_of(trainer._stepper.rules(count, "train"), [bucket] * count)
    inputs = engine._inputs.load(0, known, lambda fields: data)
    engine.reset_gradients()
    engine._has_gradients = True  # so that the trainer's next step starts from zero
    return [ModelStep(stage, "train", known.stages[s], inputs[s]) for s, stage in engine.stages.items()]


def run_plainly(parts: Sequence[ModelStep]) -> list[jax.Array]:
    """Dispatch every task, one microbatch after the other, without ever waiting; the gradient sums."""
    for j in range(len(parts[0].buckets)):
        carry: Sequence[jax.Array] = ()
        for part in parts:
            part.receive(task := Task(FORWARD, 0, j), carry)
            carry, _ = part.run(task, in_turn=True)
        for part in reversed(parts):
            part.receive(task := Task(BACKWARD, 0, j), carry)
            carry, _ = part.run(task, in_turn=True)
    return [leaf for part in parts for leaf in jax.tree.leaves(part.stage.gradients)]
