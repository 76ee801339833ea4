"""A named run that saves itself, stops before the time limit and resumes: what `sbatch slurm.sbatch` starts.

Start it here with `rrfp train --config=slurm_run.py`, or in four processes with `rrfp launch` instead.
"""

from dataclasses import dataclass

import numpy as np
import optax
from flax import nnx

import rrfp_jax as rrfp


class Dense(nnx.Module):
    def __init__(self, inputs, outputs, rngs):
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x, mb):
        return self.linear(mb["x"] if x is None else nnx.gelu(x))


def loss(x, mb):
    return rrfp.Loss(((x - mb["y"]) ** 2).sum(), weight=x.size)


@dataclass(frozen=True, kw_only=True)
class Sines(rrfp.RunConfig):
    """Four layers learn the product of two sines. Every field is a flag: `--config.width=128`."""

    width: int = 64  # of the hidden layers
    learning_rate: float = 3e-3  # of Adam

    def pipeline(self):
        sizes = [(2, self.width), (self.width, self.width), (self.width, self.width), (self.width, 1)]
        return rrfp.Pipeline([rrfp.layer(Dense, *size) for size in sizes], loss)

    def optimizer(self):
        return optax.adam(optax.constant_schedule(self.learning_rate))

    def train_data(self):
        return batches

    def validation_data(self):
        return lambda step: batches(10**6 + step)


def batches(step, microbatches=8, rows=64):
    random = np.random.default_rng(step)  # by the step's number alone, so a resumed run gets the same data
    for _ in range(microbatches):
        x = random.uniform(-2, 2, (rows, 2)).astype(np.float32)
        yield {"x": x, "y": np.sin(2 * x).prod(-1, keepdims=True)}


def get_config():
    return Sines(name="sines", steps=40, mesh=rrfp.Mesh(pp=4))
