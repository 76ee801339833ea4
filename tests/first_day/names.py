"""What the mistakes of a first day see: imports, a small NNX model that works, its data, and commands."""

import io
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rrfp_jax as rrfp
from rrfp_jax.commands.cli import main
from rrfp_jax.errors import DONE, UsageError

VOCABULARY, WIDTH, LENGTH, ROWS = 11, 4, 6, 2


class Embed(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)

    def __call__(self, carry, mb):
        return self.table(mb["tokens"])


class Block(nnx.Module):
    def __init__(self, width=WIDTH, *, rngs):
        self.up = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x, mb):
        return x + jnp.tanh(self.up(x))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, x, mb):
        return self.out(x)


def loss(logits, mb):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss(losses.sum(), weight=losses.size)


def microbatches(count=2, rows=ROWS, length=LENGTH, seed=0):
    draw = np.random.default_rng(seed)
    fields = ("tokens", "labels")
    return [
        {name: draw.integers(0, VOCABULARY, (rows, length), dtype=np.int32) for name in fields}
        for _ in range(count)
    ]


BATCH = microbatches()


def layers(embed=Embed, block=Block, head=Head):
    return [rrfp.layer(embed), rrfp.layer(block, repeat=2), rrfp.layer(head)]


def trainer(model=None, loss=loss, optimizer=None, **given):
    """A Trainer of two stages; nothing is compiled but what looks at the loss."""
    pipe = rrfp.Pipeline(layers() if model is None else model, loss)
    usual = {"data": BATCH, "mesh": rrfp.Mesh(pp=2)}
    return rrfp.Trainer(pipe, optax.sgd(0.1) if optimizer is None else optimizer, **{**usual, **given})


CONFIG = """
from dataclasses import dataclass

import optax
import rrfp_jax as rrfp
from tests.first_day import names


@dataclass(frozen=True, kw_only=True)
class Mine(rrfp.RunConfig):
    rate: float = 0.1

    def pipeline(self):
        return rrfp.Pipeline(names.layers(), names.loss)

    def optimizer(self):
        return optax.sgd(self.rate)

    def train_data(self):
        return names.BATCH


def get_config():
    return Mine(name="mine", steps=2, mesh=rrfp.Mesh(pp=2))
"""


def config(text=CONFIG, old="", new="", name="mine.py"):
    """A config file with this text, in which some of it is something else."""
    assert old in text
    Path(name).write_text(textwrap.dedent(text).replace(old, new))
    return f"--config={name}"


def command(*typed):
    """What a command prints; UsageError with what it says if it refuses."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([*typed])
    if status != DONE:
        raise UsageError(err.getvalue().strip())
    return out.getvalue()


def space():
    """The names that mistakes may use."""
    modules = {"jax": jax, "jnp": jnp, "linen": linen, "np": np, "nnx": nnx, "optax": optax, "rrfp": rrfp}
    own = (Embed, Block, Head, loss, microbatches, layers, trainer, config, command)
    return (
        modules
        | {one.__name__: one for one in own}
        | {"BATCH": BATCH, "WIDTH": WIDTH, "VOCABULARY": VOCABULARY}
    )
