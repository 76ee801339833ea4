"""The rules of a small step, and its tasks as messages name them."""

from rrfp_jax.core.hints import BF
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task


def rules(stages=2, microbatches=3, schedule=None, chunks=1, **kwargs):
    return StepRules(
        placement=Placement(stages, chunks), microbatches=microbatches, schedule=schedule or BF(), **kwargs
    )


def F(j, chunk=0):
    return Task(FORWARD, chunk, j)


def B(j, chunk=0):
    return Task(BACKWARD, chunk, j)
