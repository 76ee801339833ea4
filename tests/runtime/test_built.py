"""Objects of a plain flax loop in the wrong place: refused by what they are, and what is advised works."""

from functools import cache

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


@cache  # made when a test asks: they compile, and every worker imports this file
def built():
    return Dense(2, rngs=nnx.Rngs(0))


@cache
def bound():
    return UNIT.bind(jax.eval_shape(UNIT.init, jax.random.key(0), None, {"x": jnp.ones((1, 2))}))


@cache
def optimizer():
    return nnx.Optimizer(built(), optax.sgd(0.1), wrt=nnx.Param)


@cache
def state():
    return TrainState.create(apply_fn=UNIT.apply, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))


UNIT = Unit()
LAYERS = [rrfp.layer(Dense, 2), rrfp.layer(UNIT)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rrfp.layer(built()), "write rrfp.layer(Dense, ...) with its class and arguments"),
        (lambda: rrfp.layer(bound()), "rrfp.layer(module.unbind()[0])"),
        (lambda: rrfp.layer(optimizer()), "this is flax's nnx.Optimizer, the state of a training"),
        (lambda: rrfp.layer(state()), "this is flax's TrainState, the state of a training"),
        (
            lambda: rrfp.Pipeline([LAYERS[0], built()], loss),
            "layers[1]: Dense is a module that is already",
        ),
        (
            lambda: rrfp.Pipeline(nnx.List([built()]), loss),
            "layers[0]: Dense is a module that is already",
        ),
        (lambda: rrfp.Pipeline([Dense], loss), "layers[0]: Dense is a class; write rrfp.layer(Dense, ...)"),
        (
            lambda: rrfp.Pipeline([UNIT], loss),
            "layers[0]: Unit is a Linen module; write rrfp.layer(Unit",
        ),
        (lambda: rrfp.Pipeline([loss], loss), "layers[0]: loss is no layer; write rrfp.layer(loss)"),
        (lambda: rrfp.Pipeline(built(), loss), "Dense is one NNX module, and stages are cut between layers"),
        (lambda: rrfp.Pipeline(state(), loss), "this is flax's TrainState, the state of a training"),
        (
            lambda: rrfp.Trainer(built(), optax.sgd(0.1)),
            "the first argument is no Pipeline: Dense is one NNX",
        ),
        (lambda: rrfp.Trainer(state()), "the first argument is no Pipeline: this is flax's TrainState"),
        (
            lambda: rrfp.Trainer(rrfp.Pipeline(LAYERS, loss), optimizer()),
            "nnx.Optimizer, which holds the",
        ),
        (
            lambda: rrfp.Trainer(rrfp.Pipeline(LAYERS, loss), state()),
            "give the transformation in it, its .tx",
        ),
        (lambda: rrfp.Trainer(rrfp.Pipeline(LAYERS, loss), optax.adamw), "adamw is a function; call it"),
    ],
)
def test_it_is_refused_by_what_it_is(call, said):
    with pytest.raises(rrfp.UsageError) as refused:
        call()
    assert said in str(refused.value) and len(str(refused.value)) < 400


def test_what_is_advised_works():
    rrfp.Pipeline([rrfp.layer(Dense, 2), rrfp.layer(bound().unbind()[0])], loss)
    for given in (optimizer().tx, state().tx, optax.adamw(3e-4)):
        check_transformation(given)
