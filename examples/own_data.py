"""Three ways to give a Trainer data of your own: a function of the step, an iterable, an object that plans.

Start it with `python own_data.py`, or with one process per stage: `rrfp launch -n 2 own_data.py`.
"""

import jax
import numpy as np
import optax
from flax import nnx

import rrfp_jax as rrfp

WEIGHTS = np.random.default_rng(0).normal(size=(8, 1)).astype(np.float32)
INPUTS = np.random.default_rng(1).normal(size=(512, 8)).astype(np.float32)
TARGETS = INPUTS @ WEIGHTS  # what the model has to find
ROWS, MICROBATCHES = 16, 4


class Dense(nnx.Module):
    def __init__(self, outputs, rngs):
        self.linear = nnx.Linear(8, outputs, rngs=rngs)

    def __call__(self, x, mb):
        return self.linear(mb["x"] if x is None else nnx.tanh(x))


def loss(x, mb):
    return rrfp.Loss(((x - mb["y"]) ** 2).sum(), weight=len(x))


def rows_of(step, j):
    """Which rows of the data set microbatch `j` of a step has; a resumed run gets the same ones."""
    return np.random.default_rng((step, j)).choice(len(INPUTS), ROWS, replace=False)


def batches(step):
    """1. A function of the step that returns its microbatches: enough if making them is cheap."""
    chosen = [rows_of(step, j) for j in range(MICROBATCHES)]
    return [{"x": INPUTS[rows], "y": TARGETS[rows]} for rows in chosen]


class Loader:
    """2. An iterable, such as the DataLoader of grain or PyTorch: each `iter` begins anew. For `Stream`."""

    def __iter__(self):
        for step in range(1000):
            yield from batches(step)


class Planned:
    """3. `plan` tells the shapes, `load` reads only what is asked for: each stage loads its own fields."""

    def plan(self, step):
        x, y = jax.ShapeDtypeStruct((ROWS, 8), "float32"), jax.ShapeDtypeStruct((ROWS, 1), "float32")
        return [rrfp.Microbatch({"x": x, "y": y}, source=(step, j)) for j in range(MICROBATCHES)]

    def load(self, microbatch, fields):
        rows, arrays = rows_of(*microbatch.source), {"x": INPUTS, "y": TARGETS}
        return {name: arrays[name][rows] for name in fields}


def trained(name, data):
    """Train from the same initial values; the losses."""
    pipe = rrfp.Pipeline([rrfp.layer(Dense, 8), rrfp.layer(Dense, 1)], loss)
    trainer = rrfp.Trainer(pipe, optax.adam(3e-2), data=data, mesh=rrfp.Mesh(pp=2))
    losses = [report.loss for report in trainer.steps(30)]
    if trainer.is_main:
        print(f"{name:10}  loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return trainer, losses


_, first = trained("function", batches)
_, second = trained("iterable", rrfp.data.Stream(Loader(), microbatches=MICROBATCHES))
trainer, third = trained("plan/load", Planned())
if trainer.is_main:
    print("equal losses:", first == second == third)
