"""Objects of a plain flax loop in the wrong place: refused by what they are, and what is advised works."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import rrfp_jax as rrfp
from rrfp_jax.runtime.stages.optimizer import check_transformation


class Dense(nnx.Module):
    def __init__(self, size, *, rngs):
        self.linear = nnx.Linear(size, size, rngs=rngs)

    def __call__(self, carry, mb):
        return self.linear(mb["x"] if carry is None else carry)


class Unit(linen.Module):
    @linen.compact
    def __call__(self, carry, mb):
        return linen.Dense(2)(mb["x"] if carry is None else carry)


def loss(carry, mb):
    return rrfp.Loss(carry.sum(), weight=carry.shape[0])


BUILT, UNIT = Dense(2, rngs=nnx.Rngs(0)), Unit()
VARIABLES = jax.eval_shape(UNIT.init, jax.random.key(0), None, {"x": jnp.ones((1, 2))})
OPTIMIZER = nnx.Optimizer(BUILT, optax.sgd(0.1), wrt=nnx.Param)
STATE = TrainState.create(apply_fn=UNIT.apply, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
LAYERS = [rrfp.layer(Dense, 2), rrfp.layer(UNIT)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rrfp.layer(BUILT), "write rrfp.layer(Dense, ...) with its class and arguments"),
        (lambda: rrfp.layer(UNIT.bind(VARIABLES)), "rrfp.layer(module.unbind()[0])"),
        (lambda: rrfp.layer(OPTIMIZER), "this is flax's nnx.Optimizer, the state of a training"),
        (lambda: rrfp.layer(STATE), "this is flax's TrainState, the state of a training"),
        (
            lambda: rrfp.Pipeline([LAYERS[0], BUILT], loss),
            "layers[1]: Dense is a module that is already",
        ),
        (
            lambda: rrfp.Pipeline(nnx.List([BUILT]), loss),
            "layers[0]: Dense is a module that is already",
        ),
        (lambda: rrfp.Pipeline([Dense], loss), "layers[0]: Dense is a class; write rrfp.layer(Dense, ...)"),
        (
            lambda: rrfp.Pipeline([UNIT], loss),
            "layers[0]: Unit is a Linen module; write rrfp.layer(Unit",
        ),
        (lambda: rrfp.Pipeline([loss], loss), "layers[0]: loss is no layer; write rrfp.layer(loss)"),
        (lambda: rrfp.Pipeline(BUILT, loss), "Dense is one NNX module, and stages are cut between layers"),
        (lambda: rrfp.Pipeline(STATE, loss), "this is flax's TrainState, the state of a training"),
        (lambda: rrfp.Trainer(BUILT, optax.sgd(0.1)), "the first argument is no Pipeline: Dense is one NNX"),
        (lambda: rrfp.Trainer(STATE), "the first argument is no Pipeline: this is flax's TrainState"),
        (
            lambda: rrfp.Trainer(rrfp.Pipeline(LAYERS, loss), OPTIMIZER),
            "nnx.Optimizer, which holds the",
        ),
        (lambda: rrfp.Trainer(rrfp.Pipeline(LAYERS, loss), STATE), "give the transformation in it, its .tx"),
        (lambda: rrfp.Trainer(rrfp.Pipeline(LAYERS, loss), optax.adamw), "adamw is a function; call it"),
    ],
)
def test_it_is_refused_by_what_it_is(call, said):
    with pytest.raises(rrfp.UsageError) as refused:
        call()
    assert said in str(refused.value) and len(str(refused.value)) < 400


def test_what_is_advised_works():
    rrfp.Pipeline([rrfp.layer(Dense, 2), rrfp.layer(UNIT.bind(VARIABLES).unbind()[0])], loss)
    for given in (OPTIMIZER.tx, STATE.tx, optax.adamw(3e-4)):
        check_transformation(given)
