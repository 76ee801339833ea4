"""Fits a surface with NNX layers on two stages."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rrfp_jax as rrfp


class Dense(nnx.Module):
    def __init__(self, size_in, size_out, rngs):
        self.linear = nnx.Linear(size_in, size_out, rngs=rngs)

    def __call__(self, x, mb):
        return jnp.tanh(self.linear(mb["point"] if x is None else x))


def readout(x, mb):
    return x.mean(axis=-1)


def batches(step):
    random = np.random.default_rng(step)
    for rows in (64, 32, 64, 16):
        point = random.uniform(-1, 1, (rows, 2)).astype(np.float32)
        yield {"point": point, "height": 0.5 * np.tanh(point[:, 0] - 2 * point[:, 1])}


def squared_error(guess, mb):
    error = jnp.square(guess - mb["height"])
    return rrfp.Loss(error.sum(), weight=error.size)


layers = [rrfp.layer(Dense, 2, 64), rrfp.layer(Dense, 64, 64, repeat=2), rrfp.layer(readout)]
pipe = rrfp.Pipeline(layers, squared_error)
trainer = rrfp.Trainer(pipe, optax.lion(1e-3), data=batches, mesh=rrfp.Mesh(pp=2))
losses = [report.loss for report in trainer.steps(20)]
assert losses[-1] < 0.5 * losses[0], losses
