"""Trainers whose layers move as a test says, not as steps say; and what is left of where they were."""

import gc
import weakref

from rrfp_jax.sim.splits import Balance, Move, RebalanceDecision
from rrfp_jax.train import tuning


def decide_always_for(before, after):
    """In this process, from now on: at the second step, once, for another split."""
    real = Balance.look

    def look(balance, steps, left):
        real(balance, steps, left)  # which notes what the move is judged by
        return RebalanceDecision(100, Move(tuple(before), tuple(after), 1.0, 0.8))

    tuning.FIRST, Balance.look = 2, look


def forgets_its_engine(trainer, split):
    """Whether nothing keeps a Trainer's engine once a step with another split has ended."""
    list(trainer.steps(1))
    before = weakref.ref(trainer._engine)
    trainer.split = split
    list(trainer.steps(1))
    gc.collect()
    return before() is None
