"""A whole training step with next to nothing to compute: this runtime beside PyTorch's pipelining, in
turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, on_ranks, say
from benchmarks.rivals import common
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.transport.choice import TransportName

OURS: Mapping[str, tuple[TransportName, int]] = {
    "ours, sockets": ("socket", 1),
    "ours, nixl": ("nixl", 1),
    "ours, together": ("socket", common.LAYERS // common.RANKS),
}
"""By row, the transport, and the layers of a program: one, as usual, or a stage's, as narrow layers want."""

THEIRS = {"torch 1f1b": "1f1b", "torch zb-v": "zb-v", "torch dualpipe-v": "dualpipe-v"}
RUN_SECONDS = 300.0

Round = Mapping[str, Mapping[str, float]]
"""By system: median seconds of a "step", and "cpu" seconds of a step, of all processes."""


@bench(
    "A whole step with nothing to compute: ours beside PyTorch's pipelining, how long, at what CPU?",
    minutes="1 a round *",
    aims="not longer than torch's 1F1B, nor than its fastest",
)
def null_step(rounds: int = 5, schedule: str = "bf") -> Found:
    """2 processes, 8 microbatches of 4 x 64 numbers, 4 layers; forwards, backwards and SGD. Ours goes by
    sockets and by NIXL with a program a layer, as usual, and with one a stage; PyTorch's by gloo, in three of
    its schedules. Everybody runs once a round, 200 steps after a warm-up; aims compare what ran in the same
    round."""
    common.require_torch()
    found: list[Round] = []
    for number in range(rounds):
        own: dict[str, Any] = {
            name: on_ranks(common.RANKS, null_steps, schedule, *how, seconds=RUN_SECONDS)
            for name, how in OURS.items()
        }
        theirs = common.torch_finds("null_step", list(THEIRS.values()))
        found.append(own | {name: theirs[of] for name, of in THEIRS.items()})
        said = (f"{name} {1e3 * one['step']:.2f} ms" for name, one in found[-1].items())
        say(f"round {number}: {', '.join(said)}")
    figures = {
        name: {what: median(one[name][what] for one in found) for what in ("step", "cpu")}
        for name in found[0]
    }
    for name, one in figures.items():
        say(f"{name:18} step {1e3 * one['step']:7.2f} ms, CPU {1e3 * one['cpu']:7.2f} ms")
    return Found({"medians": figures, "rounds": found}, aims_of(found))


def ratio(rounds: Sequence[Round], ours: str, theirs: Sequence[str]) -> float:
    """Our step over the shortest of theirs in the same round, median."""
    return median(one[ours]["step"] / min(one[name]["step"] for name in theirs) for one in rounds)


def aims_of(rounds: Sequence[Round]) -> list[Aim]:
    """First ahead of PyTorch's 1F1B, then of whichever of its schedules is fastest."""
    rivals = {"torch's 1F1B": ["torch 1f1b"], "torch's fastest": list(THEIRS)}
    return [
        Aim(f"null step, {name}, of {rival}", ratio(rounds, name, theirs), 1.0, "times")
        for rival, theirs in rivals.items()
        for name in OURS
    ]


def pipeline() -> rrfp.Pipeline:
    """As many layers; the first takes the microbatch."""
    width = common.WIDTH

    def layer(params: dict[str, jax.Array], carry: jax.Array | None, mb: Any) -> jax.Array:
        x = mb["x"] if carry is None else carry
        return jnp.tanh(x @ params["weight"] + params["bias"])

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"weight": jax.random.normal(key, (width, width)) * width**-0.5, "bias": jnp.zeros(width)}

    def loss(x: jax.Array, mb: Any) -> rrfp.Loss:
        return rrfp.Loss(((x - mb["x"]) ** 2).sum(), weight=x.size)

    return rrfp.Pipeline([rrfp.layer(layer, init=init, repeat=common.LAYERS)], loss)


def null_steps(schedule: str, transport: TransportName, layers: int = 1) -> dict[str, float]:
    random = np.random.default_rng(0)
    shape = common.ROWS, common.WIDTH
    trainer = rrfp.Trainer(
        pipeline(),
        optax.sgd(common.LEARNING_RATE),
        data=[{"x": random.standard_normal(shape, np.float32)} for _ in range(common.MICROBATCHES)],
        mesh=rrfp.Mesh(pp=common.RANKS),
        schedule=schedule,
        settings=rrfp.Settings(transport=transport, layers_per_program=layers),
    )
    for _ in trainer.steps(common.WARM_UP):
        pass
    cpu, began = process_time(), [perf_counter()]
    for _ in trainer.steps(common.STEPS):
        began.append(perf_counter())
    cpu = (process_time() - cpu) / common.STEPS
    shares = join().gather("CPU seconds", cpu)
    return {"step": median(after - before for before, after in pairwise(began)), "cpu": sum(shares)}
