"""Runs that are spoilt in one known way: `rrfp-train` and `rrfp-launch` take this file as any config.

The model's blocks sleep, forwards once and backwards twice as long, for a time that follows from the length
of the microbatch. So four processes of a machine with few cores do what four devices would do. Everything
else is as in training: the split of the layers, the programs, data, messages, the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp

WIDTH = 16
UNIT = 32
"""Length of a microbatch whose blocks sleep for `block_seconds`."""


@dataclass(frozen=True, kw_only=True)
class Spoilt(rrfp.RunConfig):
    """An embedding and blocks that sleep."""

    blocks: int = 16
    block_seconds: float = 2e-3  # of a forward
    microbatches: int = 12
    slow_rank: int = -1  # whose blocks sleep longer; -1 for none
    slowness: float = 1.0  # how many times as long
    lengths: tuple[int, ...] = (UNIT,)  # of the microbatches, in turn
    load_seconds: float = 0.0  # that the data of a microbatch takes

    def pipeline(self) -> rrfp.Pipeline:
        """Embedding and blocks; the loss sums squares."""

        def block(weight: jax.Array, x: jax.Array, mb: Any) -> jax.Array:
            seconds = self.block_seconds * x.shape[1] / UNIT
            return nap(jnp.tanh(x @ weight), seconds, self.slow_rank, self.slowness)

        layers = [
            rrfp.layer(embed, init=lambda key: jnp.eye(WIDTH)),
            rrfp.layer(block, init=lambda key: jnp.eye(WIDTH), repeat=self.blocks),
        ]
        return rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss((x**2).sum(), weight=x.size))

    def optimizer(self) -> optax.GradientTransformation:
        """Plain gradient descent."""
        return optax.sgd(1e-3)

    def train_data(self) -> Late:
        """Ones, of the lengths."""
        return Late(self.lengths, self.microbatches, self.load_seconds)


@dataclass(frozen=True)
class Late:
    """Data that takes its time; see `rrfp_jax.data.contract.Data`."""

    lengths: Sequence[int]
    microbatches: int
    seconds: float

    def plan(self, step: int) -> Sequence[rrfp.Microbatch]:
        """The shapes of a step's microbatches."""
        lengths = [self.lengths[j % len(self.lengths)] for j in range(self.microbatches)]
        shapes = [(1, length, WIDTH) for length in lengths]
        return [rrfp.Microbatch({"x": jax.ShapeDtypeStruct(shape, np.float32)}) for shape in shapes]

    def load(self, microbatch: rrfp.Microbatch, fields: Collection[str]) -> Mapping[str, Any]:
        """Ones."""
        sleep(self.seconds)
        return {name: np.ones(microbatch.fields[name].shape, np.float32) for name in fields}


def embed(weight: jax.Array, x: None, mb: Any) -> jax.Array:
    """A product, so that every block's input has a gradient."""
    return jnp.matmul(mb["x"], weight)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def nap(x: jax.Array, seconds: float, slow_rank: int, slowness: float) -> jax.Array:
    """The same array, after so many seconds; its gradient takes twice as long.

    Args:
        x: of whatever shape.
        seconds: to sleep.
        slow_rank: the process that sleeps `slowness` times as long.
        slowness: see there.
    """

    def slept(probe: Any) -> Any:
        sleep(seconds * (slowness if jax.process_index() == slow_rank else 1.0))
        return np.zeros_like(probe)

    probe = x.ravel()[0]
    nothing: jax.Array = jax.pure_callback(slept, jax.ShapeDtypeStruct((), x.dtype), probe)
    return x + nothing


def _forward(x: jax.Array, seconds: float, slow_rank: int, slowness: float) -> tuple[jax.Array, None]:
    return nap(x, seconds, slow_rank, slowness), None


def _backward(seconds: float, slow_rank: int, slowness: float, kept: None, gradient: jax.Array) -> Any:
    return (nap(gradient, 2 * seconds, slow_rank, slowness),)


nap.defvjp(_forward, _backward)


def get_config() -> Spoilt:
    """Four stages, nothing spoilt."""
    return Spoilt(name="spoilt", steps=8, mesh=rrfp.Mesh(pp=4), executables=False)
