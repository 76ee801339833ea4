"""What a backward costs: split into the gradients of its input (I) and parameters (W), and adding to sums
itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from benchmarks.harness import Aim, Found, bench, say
from configs.decoders import RandomTokens
from configs.quickstart import pipeline
from models.gpt import GPTConfig
from rrfp_jax.data.contract import load_step
from rrfp_jax.runtime.autodiff.differentiate import Differentiated
from rrfp_jax.runtime.autodiff.traced import SCALE, Program
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.pipeline import IDS, INDEX
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import adding as adding_program
from rrfp_jax.runtime.programs.gradients import wide_dtype
from rrfp_jax.runtime.programs.segments import SegmentShape
from rrfp_jax.runtime.sizes import nbytes


@dataclass(frozen=True)
class Halved:
    """A traced virtual stage, compiled, with the arguments of one microbatch: values of the parameters, and
    of carry and inputs as they arrive; `seed` of the cotangents that do."""

    traced: Differentiated
    params: Sequence[Any]
    arrived: Sequence[Any]
    seed: int = 0

    @cached_property
    def programs(self) -> dict[str, Program]:
        """Forward, fused backward, input, weight."""
        t = self.traced
        return {"forward": t.forward, "backward": t.backward, "input": t.input, "weight": t.weight}

    @cached_property
    def compiled(self) -> dict[str, Compiled]:
        compiler = Compiler(StageMesh((jax.local_devices()[0],)))
        return {name: compiler(p.__call__, *p.specs) for name, p in self.programs.items()}

    @cached_property
    def arguments(self) -> list[Any]:
        """The argument list of all programs, the input's outputs at its end."""
        prepare, values = self.traced.prepare, list(self.params)
        values += jax.jit(prepare.__call__)(*(values[i] for i in prepare.reads))
        values += self.arrived
        outputs = self._apply("forward", values)
        draw = np.random.default_rng(self.seed)
        arriving = [outputs[i] for i in self.traced.moving_out]
        values += [*outputs, *(jnp.asarray(draw.normal(size=a.shape), a.dtype) for a in arriving)]
        values.append(jnp.ones(SCALE.shape, SCALE.dtype))
        return [*values, *self._apply("input", values)]

    def run(self, name: str) -> list[Any]:
        return self._apply(name, self.arguments)

    def gradients(self) -> tuple[list[Any], list[Any]]:
        """Carry gradients and gradients, by the fused backward and by its halves."""
        flowing = len(self.traced.moving_in)
        return self.run("backward"), [*self.run("input")[:flowing], *self.run("weight")]

    def flops(self, name: str) -> float:
        """By XLA's analysis of the compiled program."""
        analysis: Any = self.compiled[name].cost_analysis()  # type: ignore[attr-defined]
        return float(analysis.get("flops", 0.0))

    def held_after_forward(self) -> int:
        """Bytes that a microbatch holds for its backward, split or not, before its cotangents arrive."""
        return self._read(["input", "weight"], self.traced.cotangents)

    def held_after_input(self) -> int:
        """Bytes that it holds for the parameters' gradients, cotangents and crossing values included."""
        return self._read(["weight"], len(self.arguments))

    def _read(self, names: Sequence[str], end: int) -> int:
        """Bytes of the arguments before `end` that programs read, besides parameters and prepared values."""
        read: dict[int, Any] = {}
        for program in map(self.programs.__getitem__, names):
            read.update(zip(program.reads, program.specs, strict=True))
        return sum(nbytes(spec) for i, spec in read.items() if self.traced.fixed <= i < end)

    def _apply(self, name: str, values: Sequence[Any]) -> list[Any]:
        found: list[Any] = self.compiled[name](*(values[i] for i in self.programs[name].reads))
        return found


def dot_flops(program: Any) -> int:
    """Operations of the matrix products in a traced program, loops and calls included."""
    total = 0
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * prod(equation.outvars[0].aval.shape) * prod(left[i] for i in contracted)
        inner = sum(dot_flops(body) for body in jaxprs_in_params(equation.params))
        total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


POSITIONS = {"first": range(3), "middle": range(3, 5), "last": range(5, 8)}
"""Layers of three stages: embedding, six blocks and head, two blocks each."""


def virtual_stage(model: GPTConfig, layers: range, remat: str, batch: int, length: int) -> Halved:
    """Consecutive layers of the GPT with random parameters and a random microbatch."""
    pipe = pipeline(model)
    (microbatch,) = load_step(RandomTokens(model.vocab_size, (batch, length), 1, seed=0), 0)
    fields = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in microbatch.items()}
    shapes = pipe.shapes(fields)
    shape = SegmentShape(pipe=pipe, layers=layers, fields=fields, shapes=shapes, remat=remat)
    draw = np.random.default_rng(0)
    leaves = jax.tree.leaves(shape.params)
    params = [jnp.asarray(draw.normal(size=s.shape) * s.shape[0] ** -0.5, s.dtype) for s in leaves]
    params.append(jnp.asarray(layers.start, INDEX.dtype))
    carry = [jnp.asarray(draw.normal(size=s.shape), s.dtype) for s in jax.tree.leaves(shape.carry_in)]
    inputs = [jnp.asarray(microbatch[name]) for name in shape.input_names]
    arrived = [*carry, *inputs, jnp.zeros(IDS.shape, IDS.dtype)]
    return Halved(shape.traced(), params, arrived)


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
    return {**{n: median(s) for n, s in found.items()}, "ratio": median(ratios)}


def split_figures(halved: Halved, rows: int, rounds: int) -> dict[str, Any]:
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


MICROBATCHES = 3
KINDS = {"B": "backward", "W": "weight"}

Way = Callable[[list[Any]], list[Any]]
"""Takes the sums, whose memory it may use, and gives the new ones."""


def both_ways(halved: Halved, name: str) -> tuple[dict[str, Way], dict[str, float], list[Any]]:
    """A program that gives gradients to another one, and one that adds them; bytes moved; specs of sums."""
    params = halved.params[:-1]  # the last one is the layer's index
    program, count = halved.programs[name], len(params)
    given = [halved.arguments[i] for i in program.reads]
    specs = [jax.ShapeDtypeStruct(p.shape, wide_dtype(p.dtype)) for p in params]
    gradients = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in params]

    def plus(sums: list[Any], more: list[Any]) -> list[Any]:
        return [a + g.astype(a.dtype) for a, g in zip(sums, more, strict=True)]

    stores: Any = halved.compiled[name]
    adds = jax.jit(plus, donate_argnums=0).lower(specs, gradients).compile()
    inside = jax.jit(adding_program(program.__call__, count), donate_argnums=range(count))
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


def seconds_of(way: Way, sums: list[Any]) -> tuple[float, list[Any]]:
    """Of one microbatch, and the sums after it."""
    jax.block_until_ready(sums)
    began = perf_counter()
    sums = jax.block_until_ready(way(sums))
    return perf_counter() - began, sums


def measure(halved: Halved, name: str, rounds: int) -> dict[str, Any]:
    ways, bytes, specs = both_ways(halved, name)
    sums = {own: [jnp.zeros(spec.shape, spec.dtype) for spec in specs] for own in ways}
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
        "seconds": {own: median(found) for own, found in seconds.items()},
        "ratio": median(ratios),
        "bytes": bytes,
        "sums_that_differ": differ,
    }


WIDTHS = {"pred": 8, "bf16": 16} | {f"{sort}{bits}": bits for sort in "sufc" for bits in (8, 16, 32, 64, 128)}
"""Bits of an element."""

ARRAY = re.compile(rf"\b({'|'.join(WIDTHS)})\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.-]+) = (\([^)]*\)|\S+) ([\w-]+)\((.*?)\)(?:, |$)")
NO_KERNELS = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"}


class Traffic(NamedTuple):
    """Of one run of a program; what a kernel keeps to itself does not count."""

    kernels: int
    bytes: int


def traffic(text: str) -> Traffic:
    """Count in the entry computation of an HLO module after all optimizations."""
    _, _, entry = text.partition("\nENTRY ")
    sizes: dict[str, int] = {}
    found = Traffic(0, 0)
    for line in entry.splitlines()[1:]:
        match = INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        if match is None:
            continue
        name, shape, operation, operands = match.groups()
        sizes[name] = _nbytes(shape)
        if operation not in NO_KERNELS:
            read = sum(sizes.get(one, 0) for one in set(re.findall(r"%[\w.-]+", operands)))
            found = Traffic(found.kernels + 1, found.bytes + sizes[name] + read)
    return found


def _nbytes(shape: str) -> int:
    """Of an array, or of the arrays of a tuple."""
    return sum(
        WIDTHS[dtype] * prod(int(size) for size in sizes.split(",") if size) // 8
        for dtype, sizes in ARRAY.findall(shape)
    )


SIZES = {"d_model": 128, "n_heads": 4, "d_ff": 256, "vocab_size": 256}
ROWS, LENGTH = 4, 128


def _stages(dtype: str, remat: str, width: int) -> Iterator[tuple[str, Halved]]:
    """The first, a middle and the last stage of a small GPT."""
    sizes: dict[str, Any] = SIZES | {"d_model": width or SIZES["d_model"]}
    model = GPTConfig(dtype=jnp.dtype(dtype), n_layers=6, **sizes)
    for position, layers in POSITIONS.items():
        yield position, virtual_stage(model, layers, remat, ROWS, LENGTH)


@bench(
    "What does it cost to split a backward into I and W?",
    minutes="4 *",
    aims="1.02 times the flops; 95 % of the parameters' products in W; float32 equal to the bit",
)
def split_backward(rounds: int = 20, width: int = 0) -> Found:
    """With and without rematerialisation, in float32 and bfloat16: times of forward, fused backward, I and W,
    taken in turns (medians; the ratio is the median of each round's own); what a microbatch holds after its
    forward and after I; flops of I + W over those of the fused backward, by XLA's analysis; the share of the
    parameters' matrix products that W does; leaves that differ. The first stage has no input gradient: its W
    is its backward."""
    say("ms of F, B, I, W; (I + W) / B; MiB held after F, I; flops ratio; % of products in W; unequal leaves")
    cases = []
    for dtype, remat in product(("float32", "bfloat16"), ("none", "full")):
        for position, halved in _stages(dtype, remat, width):
            found = split_figures(halved, ROWS * LENGTH, rounds)
            cases.append({"dtype": dtype, "remat": remat, "position": position} | found)
            ms = {
                name: round(1e3 * seconds, 2) for name, seconds in found["seconds"].items() if name != "ratio"
            }
            held = [round(found[f"held_after_{name}"] / 2**20, 2) for name in ("forward", "input")]
            rest = (
                f"{found['flops_ratio']:.4f} {found['weight_share'] or 0:.1f} {found['leaves_that_differ']}"
            )
            say(f"{dtype:8} {remat:5} {position:6} {ms} {found['seconds']['ratio']:.3f} {held} {rest}")
    shares = [case["weight_share"] for case in cases if case["weight_share"] is not None]
    single = sum(case["leaves_that_differ"] for case in cases if case["dtype"] == "float32")
    return Found(
        {"cases": cases},
        [
            Aim(
                "flops of I + W over fused, worst", max(case["flops_ratio"] for case in cases), 1.02, "times"
            ),
            Aim("parameters' products in W, least", min(shares), 95.0, "%", at_least=True),
            Aim("float32 gradients that differ in a bit", float(single), 0.0, "leaves"),
        ],
    )


@bench(
    "What does it save that a backward adds its gradients itself?",
    minutes="2 *",
    aims="equal to the bit, 1.02 times as long, no more bytes",
)
def adding(rounds: int = 100, width: int = 0, hlo: tuple[str, ...] = ()) -> Found:
    """In float32 and bfloat16, B and W, beside a program that adds after it: milliseconds of both ways, taken
    in turns, and the median of each round's ratio; MiB read and written, by XLA's analysis of the programs
    compiled here; sums whose bits differ after three microbatches. With `--hlo=FOLDER,...`, instead: kernels
    of every program in a folder of `rrfp compile --hlo=FOLDER`, and the MiB that they read and write."""
    figures: dict[str, Any] = {}
    for folder in hlo:
        for file in sorted(Path(folder).glob("*.txt")):
            counted = traffic(file.read_text(encoding="utf-8"))
            figures[f"{folder} {file.stem}"] = counted._asdict()
            say(f"{folder} {file.stem}: {counted.kernels} kernels, {counted.bytes / 2**20:,.2f} MiB")
    if hlo:
        return Found(figures)
    for dtype in ("float32", "bfloat16"):
        for position, halved in _stages(dtype, "none", width):
            for letter, name in KINDS.items():
                found = figures[f"{dtype} {position} {letter}"] = measure(halved, name, rounds)
                say(f"{dtype:8} {position:6} {letter} {found}")
    own = figures.values()
    shares = [one["bytes"]["inside"] / one["bytes"]["apart"] for one in own]
    return Found(
        figures,
        [
            Aim("sums that differ", sum(one["sums_that_differ"] for one in own), 0, "arrays"),
            Aim("time inside over apart, median", median(one["ratio"] for one in own), 1.02, "times"),
            Aim("bytes inside over apart, most", max(shares), 1.0, "times"),
        ],
    )
