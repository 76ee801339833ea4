"""A named run of the toy model that validates; its steps do not depend on how many there are in all."""

from dataclasses import dataclass

import jax
import optax

import rrfp_jax as rrfp
from tests.support import toy


class Validation:
    """Some steps, so that there is something to break off."""

    steps = 8

    def plan(self, step):
        return [rrfp.Microbatch(specs(arrays), (step, j)) for j, arrays in enumerate(batch(step))]

    def load(self, microbatch, fields):
        step, number = microbatch.source
        return {name: batch(step)[number][name] for name in fields}


def batch(step):
    return toy.microbatches(2, seed=1000 + step)


def specs(arrays):
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


@dataclass(frozen=True, kw_only=True)
class InterruptedRun(rrfp.RunConfig):
    """Eight layers."""

    def pipeline(self):
        return toy.pipeline()

    def optimizer(self):
        return optax.adam(1e-3)

    def train_data(self):
        return lambda step: toy.microbatches(3, seed=step)

    def validation_data(self):
        return Validation()


def get_config():
    return InterruptedRun(
        name="trial",
        steps=10,
        mesh=rrfp.Mesh(pp=4),
        validate_every=5,
    )
