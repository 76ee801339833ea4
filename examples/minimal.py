"""A whole model, its data and its training in four pipeline stages; it learns to count by a stride.

Start it with `python minimal.py`, or with one process per stage: `rrfp launch -n 4 minimal.py`.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rrfp_jax as rrfp


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x, mb):
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return x + self.down(nnx.gelu(self.up(jnp.concatenate([x, before], axis=-1))))


def loss(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss(nll.sum(), weight=nll.size)  # sums over the microbatch, never means


def data(step):
    random = np.random.default_rng(step)
    start, stride = random.integers(0, 32, (8, 4, 1)), random.integers(1, 8, (8, 4, 1))
    numbers = (start + stride * np.arange(33)) % 32  # eight microbatches of four rows
    return [{"tokens": rows[:, :-1], "labels": rows[:, 1:]} for rows in numbers]


embed = rrfp.layer(nnx.Embed, 32, 64, call=lambda module, carry, mb: module(mb["tokens"]))
head = rrfp.layer(nnx.Linear, 64, 32, call=lambda module, x, mb: module(x))
pipe = rrfp.Pipeline([embed, rrfp.layer(Block, repeat=6), head], loss)
trainer = rrfp.Trainer(pipe, optax.adam(3e-3), data=data, mesh=rrfp.Mesh(pp=4))
for report in trainer.steps(20):
    if trainer.is_main:
        print(report)
