"""The keys that layers draw with: of a microbatch and a layer, whatever the order."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rrfp_jax as rrfp
from tests.support import toy

WIDTH = 4


def noisy_trainer(**kwargs):
    """Each layer adds w * noise(mb.key) * x with w = 1, so the gradient of its w is the noise it drew."""

    def noisy(params, carry, mb):
        return (0.0 if carry is None else carry) + params["w"] * jax.random.normal(mb.key) * mb["x"]

    def loss(carry, mb):
        return rrfp.Loss(carry.sum(), weight=mb["x"].shape[0])

    def init(key):
        return {"w": jnp.ones(())}

    kinds = [noisy, jax.checkpoint(noisy), noisy]  # the second draws again in the backward pass
    pipe = rrfp.Pipeline([rrfp.layer(kind, init=init) for kind in kinds], loss)
    batch = [{"x": np.zeros(1, np.float32)}] * 3
    return toy.trainer(2, pipe=pipe, optimizer=optax.sgd(0.0), data=batch, **kwargs)


def noise(trainer, chosen):
    """The loss, and what each layer drew in its backward, for one of three microbatches."""
    batch = [{"x": np.full(1, 3.0 * (j == chosen), np.float32)} for j in range(3)]
    value, gradient = trainer.value_and_grad(batch)
    return value, [float(gradient[str(i)]["w"]) for i in range(3)]


def drawn(trainer):
    return [number for j in range(3) for number in noise(trainer, j)[1]]


@pytest.fixture(scope="module")
def noisy():
    return noisy_trainer()


class TestRandomKeys:
    def test_forward_and_backward_draw_the_same(self, noisy):
        value, numbers = noise(noisy, 1)
        assert value == pytest.approx(sum(numbers), rel=1e-5)

    def test_microbatches_layers_and_steps_draw_differently(self, noisy):
        first = drawn(noisy)
        noisy.step([{"x": np.ones(1, np.float32)}])
        both = first + drawn(noisy)
        assert len(set(both)) == len(both) == 2 * 3 * 3

    def test_schedule_and_limit_change_nothing(self, noisy):
        found = []
        for schedule, limit in (("gpipe", None), ("1f1b", None), ("bf", 1), ("bf", 3)):
            noisy.schedule, noisy._limit = rrfp.schedules.by_name(schedule), limit
            found.append(drawn(noisy))
        assert all(numbers == found[0] for numbers in found)

    def test_seeds_draw_differently_and_repeat(self):
        seven, again, eight = (drawn(noisy_trainer(seed=seed)) for seed in (7, 7, 8))
        assert seven == again
        assert not set(seven) & set(eight)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, carry, mb):
        return self.dropout(self.linear(mb["x"]), rngs=nnx.Rngs(mb.key))


class LinenDropping(linen.Module):
    @linen.compact
    def __call__(self, carry, mb):
        return linen.Dropout(0.5, deterministic=False)(linen.Dense(WIDTH)(mb["x"]))


class LinenNoise(linen.Module):
    """Draws from a stream of its own, as flax allows; flax takes "params" for a stream that is not given."""

    @linen.compact
    def __call__(self, carry, mb):
        drawn = jax.random.normal(self.make_rng("noise"), (WIDTH,))
        return linen.Dense(WIDTH)(mb["x"]) * drawn


@pytest.mark.parametrize("module", [Dropping, LinenDropping, LinenNoise])
def test_dropout_takes_the_key(module):
    def loss(carry, mb):
        return rrfp.Loss((carry**2).sum(), weight=carry.shape[0])

    batch = [{"x": np.ones((4, WIDTH), np.float32)}] * 2
    pipe = rrfp.Pipeline([rrfp.layer(module)], loss)
    trainer = toy.trainer(1, pipe=pipe, optimizer=optax.sgd(0.0), data=batch)
    assert trainer.check().ok
    assert len({report.loss for report in trainer.steps(3)}) == 3


@pytest.mark.parametrize("frozen", [[], ["*.key"]])
def test_a_typed_key_is_no_parameter(frozen):
    def noisy(params, carry, mb):
        return params["w"] * jax.random.normal(params["key"], mb["x"].shape)

    layer = rrfp.layer(noisy, init=lambda key: {"w": jnp.ones(()), "key": key})
    pipe = rrfp.Pipeline([layer], lambda x, mb: rrfp.Loss(x.sum(), weight=x.size), frozen=frozen)
    with pytest.raises(rrfp.UsageError, match=r"parameter 0.key is a random key, key<fry>: keep its numbers"):
        toy.trainer(1, pipe=pipe, data=[{"x": np.ones(1, np.float32)}]).start()
