"""One rank of the null step by this runtime; started by `null_step.py`.

rrfp launch -n 2 -m benchmarks.rivals.null_step_rank FILE SCHEDULE TRANSPORT

Rank 0 writes {"step": median seconds of a step, "cpu": CPU seconds of a step, of all processes}.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.rivals import tiny
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.transport.choice import TransportName


def pipeline() -> rrfp.Pipeline:
    """As many layers; the first takes the microbatch."""

    def layer(params: dict[str, jax.Array], carry: jax.Array | None, mb: Any) -> jax.Array:
        x = mb["x"] if carry is None else carry
        return jnp.tanh(x @ params["weight"] + params["bias"])

    def init(key: jax.Array) -> dict[str, jax.Array]:
        weight = jax.random.normal(key, (tiny.WIDTH, tiny.WIDTH)) * tiny.WIDTH**-0.5
        return {"weight": weight, "bias": jnp.zeros(tiny.WIDTH)}

    def loss(x: jax.Array, mb: Any) -> rrfp.Loss:
        return rrfp.Loss(((x - mb["x"]) ** 2).sum(), weight=x.size)

    return rrfp.Pipeline([rrfp.layer(layer, init=init, repeat=tiny.LAYERS)], loss)


def main(file: str, schedule: str, transport: TransportName) -> None:
    """Run the steps; rank 0 writes."""
    world = join()
    random = np.random.default_rng(0)
    data = [
        {"x": random.standard_normal((tiny.ROWS, tiny.WIDTH), np.float32)} for _ in range(tiny.MICROBATCHES)
    ]
    trainer = rrfp.Trainer(
        pipeline(),
        optax.sgd(tiny.LEARNING_RATE),
        data=data,
        mesh=rrfp.Mesh(pp=tiny.RANKS),
        schedule=schedule,
        settings=rrfp.Settings(transport=transport),
    )
    for _ in trainer.steps(tiny.WARM_UP):
        pass
    cpu, began = process_time(), [perf_counter()]
    for _ in trainer.steps(tiny.STEPS):
        began.append(perf_counter())
    cpu = (process_time() - cpu) / tiny.STEPS
    took = [after - before for before, after in pairwise(began)]
    shares = world.gather("CPU seconds", cpu)
    if world.rank == 0:
        found = {"step": median(took), "cpu": sum(shares)}
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # the Trainer refuses what is no transport
