"""What it saves that a backward adds its gradients to the sums itself, instead of a program after it.

    python -m benchmarks.runtime.adding [--json=FILE] [--check] [--rounds=N] [--d_model=D] ...
    python -m benchmarks.runtime.adding --hlo=FOLDER [--hlo=FOLDER ...]

For the first, a middle and the last stage of a small GPT in float32 and bfloat16, B and W: milliseconds of
both ways, taken in turns, and the median of each round's ratio; MiB read and written, by XLA's analysis of
the programs compiled here; sums whose bits differ after three microbatches.

With `--hlo`, instead: kernels of every program in a folder of `rrfp compile --hlo=FOLDER`, and the MiB that
they read and write.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Aim, finish, parse
from benchmarks.runtime.halved import Halved
from benchmarks.runtime.hlo_traffic import traffic_of
from benchmarks.runtime.split_backward import POSITIONS, virtual_stage
from models.gpt import GPTConfig
from rrfp_jax.runtime.programs.gradients import adding, wide_dtype

MICROBATCHES = 3
KINDS = {"B": "backward", "W": "weight"}

Way = Callable[[list[Any]], list[Any]]
"""Takes the sums, whose memory it may use, and gives the new ones."""


def both_ways(halved: Halved, name: str) -> tuple[dict[str, Way], dict[str, float], list[Any]]:
    """A program that gives gradients to another one, and one that adds them; bytes moved; specs of sums."""
    program, count = halved.programs[name], len(halved.params)
    given = [halved.arguments[i] for i in program.reads]
    specs = [jax.ShapeDtypeStruct(p.shape, wide_dtype(p.dtype)) for p in halved.params]
    gradients = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in halved.params]

    def plus(sums: list[Any], more: list[Any]) -> list[Any]:
        return [a + g.astype(a.dtype) for a, g in zip(sums, more, strict=True)]

    stores: Any = halved.compiled[name]
    adds = jax.jit(plus, donate_argnums=0).lower(specs, gradients).compile()
    inside = jax.jit(adding(program.__call__, count), donate_argnums=range(count))
    itself = inside.lower(*specs, *program.specs).compile()
    ways: dict[str, Way] = {
        "apart": lambda sums: adds(sums, stores(*given)[-count:]),
        "inside": lambda sums: itself(*sums, *given)[-1 - count : -1],
    }
    bytes = {"apart": moved(stores) + moved(adds), "inside": moved(itself)}
    return ways, bytes, specs


def moved(compiled: Any) -> float:
    """Bytes that a compiled program reads and writes."""
    return float((compiled.cost_analysis() or {})["bytes accessed"])


def zeros(specs: Sequence[Any]) -> list[Any]:
    """Sums to begin with."""
    return [jnp.zeros(spec.shape, spec.dtype) for spec in specs]


def seconds_of(way: Way, sums: list[Any]) -> tuple[float, list[Any]]:
    """Of one microbatch, and the sums after it."""
    jax.block_until_ready(sums)
    began = perf_counter()
    sums = jax.block_until_ready(way(sums))
    return perf_counter() - began, sums


def measure(halved: Halved, name: str, rounds: int) -> dict[str, Any]:
    """Figures of one program of a stage."""
    ways, bytes, specs = both_ways(halved, name)
    sums = {own: zeros(specs) for own in ways}
    for _ in range(MICROBATCHES):
        sums = {own: way(sums[own]) for own, way in ways.items()}
    pairs = zip(sums["apart"], sums["inside"], strict=True)
    differ = sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
    seconds: dict[str, list[float]] = {own: [] for own in ways}
    for number in range(rounds):
        for own in sorted(ways, reverse=number % 2 == 1):
            taken, sums[own] = seconds_of(ways[own], sums[own])
            seconds[own].append(taken)
    ratios = [b / a for a, b in zip(seconds["apart"], seconds["inside"], strict=True)]
    return {
        "seconds": {own: statistics.median(found) for own, found in seconds.items()},
        "ratio": statistics.median(ratios),
        "bytes": bytes,
        "sums_that_differ": differ,
    }


def share_of_bytes(found: dict[str, Any]) -> float:
    """Moved inside over apart."""
    return float(found["bytes"]["inside"] / found["bytes"]["apart"])


def on_this_machine(options: Any) -> tuple[dict[str, Any], list[Aim]]:
    """All stages, as a table."""
    sizes = {name: getattr(options, name) for name in ("d_model", "n_heads", "d_ff", "vocab_size")}
    print("ms apart, inside, ratio; MiB apart, inside; sums that differ")
    figures: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        model = GPTConfig(dtype=jnp.dtype(dtype), n_layers=6, **sizes)
        stage = partial(virtual_stage, model, remat="none", batch=options.batch, length=options.length)
        for position, layers in POSITIONS.items():
            halved = stage(layers=layers)
            for letter, name in KINDS.items():
                found = figures[f"{dtype} {position} {letter}"] = measure(halved, name, options.rounds)
                ms = [1e3 * found["seconds"][own] for own in ("apart", "inside")]
                mib = [found["bytes"][own] / 2**20 for own in ("apart", "inside")]
                print(
                    f"{dtype:8} {position:6} {letter} {ms[0]:8.2f} {ms[1]:8.2f} {found['ratio']:6.3f} "
                    f"{mib[0]:8.2f} {mib[1]:8.2f} {found['sums_that_differ']:3d}",
                    flush=True,
                )
    every = figures.values()
    aims = [
        Aim("sums that differ", sum(own["sums_that_differ"] for own in every), 0, "arrays"),
        Aim("time inside over apart, median", statistics.median(o["ratio"] for o in every), 1.02, "times"),
        Aim("bytes inside over apart, most", max(map(share_of_bytes, every)), 1.0, "times"),
    ]
    return figures, aims


def main() -> int:
    """Measure every stage, or count in folders; print, write."""
    parser = parse(__doc__)
    parser.add_argument("--hlo", type=Path, action="append", default=[], metavar="FOLDER", help="count here")
    for name, default in {"d_model": 128, "n_heads": 4, "d_ff": 256, "vocab_size": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    for name, default in {"batch": 4, "length": 128, "rounds": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    options = parser.parse_args()
    if not options.hlo:
        return finish(options, *on_this_machine(options))
    figures: dict[str, Any] = {}
    for folder in options.hlo:
        for name, found in traffic_of(folder).items():
            figures[f"{folder} {name}"] = found._asdict()
            print(f"{folder} {name}: {found.kernels} kernels, {found.bytes / 2**20:,.2f} MiB")
    return finish(options, figures, [])


if __name__ == "__main__":
    sys.exit(main())
