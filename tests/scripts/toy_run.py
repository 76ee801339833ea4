"""A named run of the toy model, which compiles in a second."""

from dataclasses import dataclass

import optax

import rrfp_jax as rrfp
from tests.support import toy


@dataclass(frozen=True, kw_only=True)
class ToyRun(rrfp.RunConfig):
    def pipeline(self):
        return toy.pipeline()

    def optimizer(self):
        return optax.sgd(0.1)

    def train_data(self):
        return lambda step: toy.microbatches(3, seed=step)


def get_config():
    return ToyRun(name="toy", steps=100_000, mesh=rrfp.Mesh(pp=4))
