"""With `equal_schedules` every schedule of a placement runs the same programs, so its bits are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import BACKWARD, INPUT, WEIGHT
from rrfp_jax.runtime.engine.pacing import Delays
from tests.support import toy
from tests.support.refusals import refused
from tests.support.toy import made

WIDTH, ROWS = 16, 4
pytestmark = pytest.mark.optimized

SCHEDULES = ["bf", "gpipe", "bfw", "zb-h1", "1f1b"]


def linear(params, x, mb):
    """A bias whose gradient is a sum over rows after a gather, which XLA may do in several orders."""
    x = mb["x"] if x is None else x
    y = (x @ params["w"] + params["b"]).reshape(ROWS, 4, WIDTH // 4)
    return jnp.tanh(y[:, mb["picks"]]).reshape(ROWS, WIDTH)


def init(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)}


def batch(count=6):
    draw = np.random.default_rng(0)
    return [
        {
            "x": draw.standard_normal((ROWS, WIDTH)).astype(np.float32),
            "picks": draw.integers(0, 4, 4).astype(np.int32),
        }
        for _ in range(count)
    ]


def loss(x, mb):
    return rrfp.Loss((x**3).sum(), weight=x.shape[0])


@pytest.fixture(scope="module", params=["none", "full"])
def trainer(request):
    pipe = rrfp.Pipeline([rrfp.layer(linear, init=init, repeat=8)], loss)
    return made(
        pipe, data=batch(), mesh=rrfp.Mesh(pp=4), schedule="bf", equal_schedules=True, remat=request.param
    )


def test_gradients_are_equal_to_the_bit_under_all_schedules_and_those_of_plain_jax(trainer):
    assert trainer.check().ok
    expected = None
    for schedule in SCHEDULES:
        trainer.schedule = schedule
        found = jax.device_get(trainer.value_and_grad(batch()))
        expected = expected or found
        assert found[0] == expected[0], schedule
        pairs = zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs), schedule


def test_a_whole_backward_is_its_halves_one_after_the_other(trainer):
    trainer.schedule = "bf"
    trainer.value_and_grad(batch())
    (programs,) = trainer._engine.library.all_programs("train")
    for own in programs.values():
        called = [call.program for call in own[0].tasks[BACKWARD].program.calls]
        halves = [segment.lowered[part] for segment in own[0].segments[::-1] for part in (INPUT, WEIGHT)]
        assert called == [program for program in halves if program is not None]
        assert own[0].footprint.temporary_bytes["B"] >= 0


def test_it_goes_with_adding_in_order_only():
    with refused("equal_schedules=True", "accumulation='arrival'", "'index'"):
        toy.trainer(2, equal_schedules=True, accumulation="arrival")
    with refused("equal_schedules='yes'", "True or False"):
        toy.trainer(2, equal_schedules="yes")


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


def trainer_of(dtype, tp, **settings):
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
    own = trainer_of(dtype, tp)
    for schedules in (WHOLE, SPLIT):
        first, *others = found_by(own, schedules)
        assert all(other == first for other in others), schedules


@pytest.mark.parametrize(("dtype", "tp"), [("bfloat16", 1), ("bfloat16", 2)])
def test_all_schedules_are_equal_to_the_bit_if_they_are_made_so(dtype, tp):
    first, *others = found_by(trainer_of(dtype, tp, equal_schedules=True), (WHOLE[-1], SPLIT[-1]))
    assert all(other == first for other in others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_the_stage_that_has_a_layer(dtype):
    one, two, v = rrfp.Mesh(pp=1), rrfp.Mesh(pp=2), rrfp.Mesh(pp=2, chunks=2, shape="v")
    found = []
    for mesh, split in ((one, [4]), (two, [1, 3]), (two, [3, 1]), (v, None)):
        own = toy.trainer(
            mesh=mesh, pipe=pipeline(dtype), data=toy.microbatches(4), split=split, schedule="bf"
        )
        losses = [report.loss for report in own.steps(2)]
        found.append((losses, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(own.stage_params)]))
    assert all(own == found[0] for own in found)
