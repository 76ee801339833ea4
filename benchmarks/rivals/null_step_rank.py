"""One rank of the null step by this runtime; started by `null_step.py`.

rrfp-launch -n 2 -m benchmarks.rivals.null_step_rank QUESTION ANSWER

The question: {"tiny": fields of `NullStep`, "schedule": by name, "transport": by name}; the answer, by rank
0: {"step": median seconds of a step, "cpu": CPU seconds of a step, of all processes}.
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
from benchmarks.rivals.tiny import NullStep
from rrfp_jax.runtime.lifecycle.join import join


def pipeline(tiny: NullStep) -> rrfp.Pipeline:
    """As many layers; the first takes the microbatch."""

    def layer(params: dict[str, jax.Array], carry: jax.Array | None, mb: Any) -> jax.Array:
        x = mb["x"] if carry is None else carry
        return jnp.tanh(x @ params["weight"] + params["bias"])

    def init(key: jax.Array) -> dict[str, jax.Array]:
        weight = jax.random.normal(key, (tiny.width, tiny.width)) * tiny.width**-0.5
        return {"weight": weight, "bias": jnp.zeros(tiny.width)}

    def loss(x: jax.Array, mb: Any) -> rrfp.Loss:
        return rrfp.Loss(((x - mb["x"]) ** 2).sum(), weight=x.size)

    return rrfp.Pipeline([rrfp.layer(layer, init=init, repeat=tiny.layers)], loss)


def main(asked: str, to: str) -> None:
    """Run the steps; rank 0 writes."""
    question = json.loads(Path(asked).read_text(encoding="utf-8"))
    tiny, world = NullStep(**question["tiny"]), join()
    random = np.random.default_rng(0)
    data = [
        {"x": random.standard_normal((tiny.rows, tiny.width), np.float32)} for _ in range(tiny.microbatches)
    ]
    trainer = rrfp.Trainer(
        pipeline(tiny),
        optax.sgd(tiny.learning_rate),
        data=data,
        mesh=rrfp.Mesh(pp=tiny.ranks),
        schedule=question["schedule"],
        transport=question["transport"],
    )
    for _ in trainer.steps(tiny.warm_up):
        pass
    cpu, began = process_time(), [perf_counter()]
    for _ in trainer.steps(tiny.steps):
        began.append(perf_counter())
    cpu = (process_time() - cpu) / tiny.steps
    took = [after - before for before, after in pairwise(began)]
    shares = world.gather("CPU seconds", cpu)
    if world.rank == 0:
        found = {"step": median(took), "cpu": sum(shares)}
        Path(to).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
