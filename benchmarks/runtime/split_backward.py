"""What it costs to split a stage's backward into the gradients of its input (I) and of its parameters (W).

    python -m benchmarks.runtime.split_backward [--json=FILE] [--check] [--rounds=N] [--d_model=D] ...

For the first, a middle and the last stage of a small GPT, with and without rematerialisation, in float32 and
bfloat16: times of forward, fused backward, I and W, taken in turns (medians; the ratio is the median of each
round's own); what a microbatch holds after its forward and after I; flops of I + W over those of the fused
backward, by XLA's analysis; the share of the parameters' matrix products that W does; leaves that differ.

The first stage has no input gradient: its W is its backward.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Aim, finish, parse
from benchmarks.runtime.halved import Halved, dot_flops
from configs.decoders import RandomTokens
from configs.quickstart import pipeline
from models.gpt import GPTConfig
from rrfp_jax.data.contract import load_step
from rrfp_jax.runtime.autodiff.differentiate import differentiate
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.stage_programs import VirtualStageShape

POSITIONS = {"first": range(3), "middle": range(3, 5), "last": range(5, 8)}
"""Layers of three stages: embedding, six blocks and head, two blocks each."""


def virtual_stage(model: GPTConfig, layers: range, remat: str, batch: int, length: int) -> Halved:
    """Consecutive layers of the GPT with random parameters and a random microbatch."""
    pipe = pipeline(model)
    (microbatch,) = load_step(RandomTokens(model.vocab_size, (batch, length), 1, seed=0), 0)
    fields = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in microbatch.items()}
    shapes = pipe.shapes(fields)
    shape = VirtualStageShape(pipe=pipe, layers=layers, fields=fields, shapes=shapes, remat=remat)
    draw = np.random.default_rng(0)
    leaves = jax.tree.leaves(shape.params)
    params = [jnp.asarray(draw.normal(size=s.shape) * s.shape[0] ** -0.5, s.dtype) for s in leaves]
    carry = [jnp.asarray(draw.normal(size=s.shape), s.dtype) for s in jax.tree.leaves(shape.carry_in)]
    inputs = [jnp.asarray(microbatch[name]) for name in shape.input_names]
    arrived = [*carry, *inputs, jnp.zeros(IDS.shape, IDS.dtype)]
    return Halved(differentiate(shape.flat, *shape.specs()), params, arrived)


def weight_share(halved: Halved, rows: int) -> float:
    """Percentage of the matrix products for parameters' gradients that W does.

    How many there are follows from the shapes: two operations for each of `rows` tokens and matrix element.
    """
    elements = sum(int(p.size) for p in halved.params if p.ndim == 2)
    return 100 * dot_flops(halved.traced.weight.closed) / (2 * rows * elements)


def times(halved: Halved, rounds: int) -> dict[str, Any]:
    """Median seconds of each program, and of I + W over the fused backward, all in turns."""
    names = [name for name, program in halved.programs.items() if program.closed.jaxpr.outvars]
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name in names:
            begin = perf_counter()
            jax.block_until_ready(halved.run(name))
            found[name].append(perf_counter() - begin)
    found = {name: seconds[1:] for name, seconds in found.items()}
    parts = zip(*(found[name] for name in ("input", "weight") if name in found), strict=True)
    ratios = [sum(part) / fused for part, fused in zip(parts, found["backward"], strict=True)]
    return {**{n: statistics.median(s) for n, s in found.items()}, "ratio": statistics.median(ratios)}


def measure(halved: Halved, rows: int, rounds: int) -> dict[str, Any]:
    """All figures of one stage."""
    fused, halves = halved.gradients()
    differ = sum(not np.array_equal(a, b) for a, b in zip(fused, halves, strict=True))
    split_flops = halved.flops("input") + halved.flops("weight")
    return {
        "seconds": times(halved, rounds),
        "held_after_forward": halved.held_after_forward(),
        "held_after_input": halved.held_after_input(),
        "flops_ratio": split_flops / halved.flops("backward"),
        "weight_share": weight_share(halved, rows) if halved.traced.moving_in else None,
        "leaves_that_differ": differ,
    }


def row(case: Mapping[str, Any]) -> str:
    """A line of the table; milliseconds and MiB."""
    seconds = case["seconds"]
    spent = " ".join(
        f"{1e3 * seconds[name]:7.2f}" if name in seconds else "      -"
        for name in ("forward", "backward", "input", "weight")
    )
    held = [case[f"held_after_{name}"] / 2**20 for name in ("forward", "input")]
    share = "    -" if case["weight_share"] is None else f"{case['weight_share']:5.1f}"
    return (
        f"{case['dtype']:8} {case['remat']:5} {case['position']:6} {spent} {seconds['ratio']:6.3f} "
        f"{held[0]:7.2f} {held[1]:7.2f} {case['flops_ratio']:7.4f} {share} {case['leaves_that_differ']:3d}"
    )


def main() -> int:
    """Measure every stage, print a table, write."""
    parser = parse(__doc__)
    for name, default in {"d_model": 128, "n_heads": 4, "d_ff": 256, "vocab_size": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    for name, default in {"batch": 4, "length": 128, "rounds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("d_model", "n_heads", "d_ff", "vocab_size")}
    print(
        "ms of F, B, I, W; (I + W) / B; MiB held after F, I; flops ratio; % of products in W; unequal leaves"
    )
    cases = []
    for dtype, remat, position in itertools.product((jnp.float32, jnp.bfloat16), ("none", "full"), POSITIONS):
        model = GPTConfig(dtype=dtype, n_layers=6, **sizes)
        halved = virtual_stage(model, POSITIONS[position], remat, options.batch, options.length)
        named = {"dtype": jnp.dtype(dtype).name, "remat": remat, "position": position}
        cases.append(named | measure(halved, options.batch * options.length, options.rounds))
        print(row(cases[-1]), flush=True)
    shares = [case["weight_share"] for case in cases if case["weight_share"] is not None]
    single = [case["leaves_that_differ"] for case in cases if case["dtype"] == "float32"]
    aims = [
        Aim("flops of I + W over fused, worst", max(case["flops_ratio"] for case in cases), 1.02, "times"),
        Aim("parameters' products in W, least", min(shares), 95.0, "%", at_least=True),
        Aim("float32 gradients that differ in a bit", float(sum(single)), 0.0, "leaves"),
    ]
    return finish(options, {"sizes": vars(options) | {"json": None}, "cases": cases}, aims)


if __name__ == "__main__":
    sys.exit(main())
