"""A named run of a small model that validates and saves itself; faults come at its moments (`moments.py`)."""

import atexit
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

import rrfp_jax as rrfp
from tests.nodes.moments import at, enter
from tests.scripts.small_model import microbatches, pipeline


def block(params, carry, mb):
    at("compiling")
    return carry + jnp.tanh(carry @ params["weight"])


class Validation:
    """Some steps, of which every rank plans each."""

    steps = 2

    def plan(self, step):
        enter("validation")
        arrays = enumerate(microbatches(1000 + step, 4))
        return [rrfp.Microbatch(specs(own), (step, number)) for number, own in arrays]

    def load(self, microbatch, fields):
        step, number = microbatch.source
        return {name: microbatches(1000 + step, 4)[number][name] for name in fields}


def specs(arrays):
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


@dataclass(frozen=True, kw_only=True)
class FaultedRun(rrfp.RunConfig):
    def pipeline(self):
        return pipeline(block)

    def optimizer(self):
        return optax.adam(1e-2)

    def train_data(self):
        return lambda step: microbatches(step, 4)

    def validation_data(self):
        return Validation()

    def on_step(self, report):
        enter("step")
        return False


def get_config():
    atexit.register(at, "shutdown")  # before what the runtime has registered
    return FaultedRun(
        name="faulted",
        steps=8,
        mesh=rrfp.Mesh(pp=4),
        validate_every=5,
        checkpoint=rrfp.Checkpointing(every_steps=4),
        executables=None,
    )
