"""A config of a run of two stages on two nodes; what its layers compute is in a module of its own."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
from activation import activate  # in a folder of the test's

import rrfp_jax as rrfp


def embed(carry, mb):
    return mb["x"]


def block(params, x, mb):
    return activate(x @ params["w"])


def block_init(key):
    return {"w": jax.random.normal(key, (4, 4))}


def loss(x, mb):
    return rrfp.Loss((x**2).sum(), weight=float(x.size))


@dataclass(frozen=True, kw_only=True)
class SmallRun(rrfp.RunConfig):
    def pipeline(self):
        return rrfp.Pipeline([rrfp.layer(embed), rrfp.layer(block, init=block_init, repeat=2)], loss)

    def optimizer(self):
        return optax.sgd(0.1)

    def train_data(self):
        return [{"x": np.ones((2, 4), np.float32)}] * 2


def get_config():
    saved = rrfp.Checkpointing(every_steps=2)
    return SmallRun(name="small", steps=4, mesh=rrfp.Mesh(pp=2), checkpoint=saved)
