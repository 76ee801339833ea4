"""Evaluations of other shapes, and of another number of microbatches, than training has."""

import numpy as np
import pytest

from tests.support import toy


def steps(step):
    """Two steps with very different numbers of unmasked tokens; no shape or number is that of training."""
    batch = toy.microbatches(3, seed=step, length=12)
    for mb in batch:
        mb["mask"][1:] *= step
    return batch


def test_an_evaluation_is_that_of_plain_jax_and_leaves_training_as_it_was():
    """The shapes that it evaluates can be trained on afterwards."""
    trainer = toy.trainer(2)
    trainer.start()
    found = trainer.evaluate(steps, steps=2)
    losses, weights = zip(
        *(
            (float(toy.reference(trainer.stage_params, batch)[0]), sum(mb["mask"].sum() for mb in batch))
            for batch in map(steps, range(2))
        ),
        strict=True,
    )
    assert weights[1] > 1.5 * weights[0]
    assert found.weight == sum(weights)
    assert found.loss == pytest.approx(np.average(losses, weights=weights), rel=1e-6)
    loss, gradient = trainer.value_and_grad(steps(0))
    expected_loss, expected = toy.reference(trainer.stage_params, steps(0))
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    assert toy.worst_leaf(gradient, expected) <= 1e-5
    assert trainer.steps_done == 0 and next(trainer.steps(1)).step == 0
