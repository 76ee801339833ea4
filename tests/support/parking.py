"""Gradients that are parked though it is their turn, and added right after: nobody may see a difference."""

from contextlib import contextmanager

import pytest

from rrfp_jax.core.tasks import KINDS
from rrfp_jax.runtime.stages.step import ModelStep


@contextmanager
def every_gradient_parked():
    """Let no program add to the sums itself, while this is open."""
    run = ModelStep.run

    def parked(self, task, in_turn):
        found = run(self, task, False)
        if in_turn and KINDS[task.kind].charge < 0:
            self.accumulate(task.chunk, task.microbatch)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ModelStep, "run", parked)
        yield
