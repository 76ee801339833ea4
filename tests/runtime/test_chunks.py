"""Several virtual stages of the model on a stage: looped and V-shaped."""

import chex
import pytest

import rrfp_jax as rrfp
from tests.support import toy

PLACEMENTS = [(4, 2, "looped"), (2, 4, "looped"), (4, 2, "v"), (2, 3, "v"), (1, 3, "looped")]


def trainer(stages, chunks, shape, **kwargs):
    return toy.trainer(mesh=rrfp.Mesh(pp=stages, chunks=chunks, shape=shape), **kwargs)


@pytest.mark.parametrize(("stages", "chunks", "shape"), PLACEMENTS)
def test_gradients_are_those_of_the_whole_batch(stages, chunks, shape):
    own, batch = trainer(stages, chunks, shape), toy.microbatches(2 * stages)
    loss, gradient = own.value_and_grad(batch)
    expected_loss, expected = toy.reference(own.stage_params, batch)
    assert abs(loss - float(expected_loss)) <= 1e-6 * abs(float(expected_loss))
    assert toy.worst_leaf(gradient, expected) <= 1e-5


def test_initial_values_do_not_depend_on_the_placement():
    one, other = trainer(1, 1, "looped"), trainer(4, 2, "v")
    one.start()
    other.start()
    chex.assert_trees_all_equal(one.stage_params, other.stage_params)
