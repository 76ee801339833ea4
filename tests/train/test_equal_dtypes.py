"""Schedules give equal bits in bfloat16 and on stages of two devices, too; see docs/numbers.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from rrfp_jax.runtime.engine.pacing import Delays
from tests.support import toy

pytestmark = pytest.mark.optimized

WHOLE, SPLIT = ("1f1b", "gpipe", "bf"), ("zb-h1", "bfw")


def pipeline(dtype):
    """The toy model with its products in `dtype`, on stages of two devices if the mesh has such."""

    def block(params, carry, mb):
        x, up, down = (leaf.astype(dtype) for leaf in (carry["x"], params["up"], params["down"]))
        x = x + jnp.tanh(x @ up) @ down + params["bias"].astype(dtype)
        return {"x": x, "positions": carry["positions"]}

    embed, _, head = toy.layers()
    layers = [embed, rrfp.layer(block, init=toy.block_init, repeat=2), head]
    return rrfp.Pipeline(layers, toy.loss, sharding={"*.up": P(None, "tp"), "*.down": P("tp", None)})


def trainer(dtype, tp, **settings):
    delays = Delays(skew=0.002, seed=1)
    return toy.trainer(mesh=rrfp.Mesh(pp=2, tp=tp), pipe=pipeline(dtype), delays=delays, **settings)


def found_by(own, schedules):
    """Loss and gradients of one batch under each schedule, as bytes."""
    batch = toy.microbatches(6)
    for schedule in schedules:
        own.schedule = schedule
        loss, gradient = own.value_and_grad(batch)
        yield np.float64(loss).tobytes(), [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(gradient)]


@pytest.mark.parametrize(("dtype", "tp"), [("bfloat16", 1), ("float32", 2), ("bfloat16", 2)])
def test_schedules_of_one_kind_of_backward_are_equal_to_the_bit(dtype, tp):
    own = trainer(dtype, tp)
    for schedules in (WHOLE, SPLIT):
        first, *others = found_by(own, schedules)
        assert all(other == first for other in others), schedules


@pytest.mark.parametrize(("dtype", "tp"), [("bfloat16", 1), ("bfloat16", 2)])
def test_all_schedules_are_equal_to_the_bit_if_they_are_made_so(dtype, tp):
    first, *others = found_by(trainer(dtype, tp, equal_schedules=True), (WHOLE[-1], SPLIT[-1]))
    assert all(other == first for other in others)
