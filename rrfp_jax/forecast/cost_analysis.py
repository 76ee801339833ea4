"""What a traced program costs, found without compiling it: no device is touched.

Operations are what XLA's analysis counts before it compiles. Its count of bytes is of no use then, because it
has every operation read and write memory, and a compiled program fuses most of them. So bytes are counted
here, as if elementwise operations and moves were computed where they are used, in reductions too, but not in
products:

    written     results of the program, of products and all else that is not fused, and what these read
    read        by each of them, and by each reduction, whatever is written of what it follows from

Temporaries are an upper bound: what is written is there from its kernel to the last one that reads it, in the
program's order. A compiler that reuses a place earlier, or writes a value in a narrower type, needs less.

XLA counts the body of a loop once. Here the body of a scan is analysed by itself and counted as often as it
runs. A loop of unknown length counts once. What a custom kernel does is not known.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from timeit import Timer
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from rrfp_jax.forecast.devices import Accelerator
from rrfp_jax.runtime.autodiff.traced import REPEATABLE, inline, spec_of, without_barriers
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.sizes import memory_limit, nbytes

FUSED = REPEATABLE | {
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "tanh", "erf", "erf_inv", "sin", "cos"),
    *("pow", "sqrt", "rsqrt", "cbrt", "floor", "ceil", "round", "rem", "is_finite", "stop_gradient"),
    "polynomial",
}
"""Primitives that are computed where they are used."""

SCAN = "scan"


@dataclass(frozen=True)
class ProgramCost:
    """What one run of a program takes; asked for its memory like a compiled one.

    Attributes:
        flops: operations, by the dtype of the matrix products that most of them belong to.
        bytes: moved between memory and processor.
        temp_size_in_bytes: held at once while it runs, besides arguments and results; an upper bound.
    """

    flops: Mapping[str, float]
    bytes: float
    temp_size_in_bytes: int

    def memory_analysis(self) -> ProgramCost:
        """As of a compiled program, whose bytes of temporaries are asked for."""
        return self

    def __add__(self, other: ProgramCost) -> ProgramCost:
        """Of both, one after the other."""
        names = {**self.flops, **other.flops}
        flops = {name: self.flops.get(name, 0.0) + other.flops.get(name, 0.0) for name in names}
        temporary = max(self.temp_size_in_bytes, other.temp_size_in_bytes)
        return ProgramCost(flops, self.bytes + other.bytes, temporary)


Kernel: TypeAlias = tuple[JaxprEqn, Set[Any]]
"""Operations that are computed together: the last of them, and what they read of memory."""


def program_cost(closed: ClosedJaxpr, added: int = 0) -> ProgramCost:
    """The cost of a program whose last `added` results are gradients, each added to a sum at once."""
    _, flops, products = _operations(closed)
    whole = sum(products.values())
    shares = {dtype: n / whole for dtype, n in products.items()} if whole else {"float32": 1.0}
    flat = _flat(closed, added)
    by_dtype = {dtype: flops * share for dtype, share in shares.items()}
    return ProgramCost(by_dtype, bytes=_bytes_moved(flat), temp_size_in_bytes=_most_at_once(flat))


def _operations(closed: ClosedJaxpr) -> tuple[float, float, Counter[str]]:
    """How many, as XLA counts them, loops once, and as often as they run; of products by their dtype."""
    traced: Any = jax.jit(jaxpr_as_fun(closed)).trace(*map(spec_of, closed.jaxpr.invars))
    try:
        lowered = traced.lower()
    except NotImplementedError:  # kernels of cuDNN, which only GPUs have
        lowered = traced.lower(lowering_platforms=("cuda",))
    analysis = lowered.cost_analysis() or {}
    once, products = analysis.get("flops", 0.0), Counter[str]()
    flops = once
    for equation in inline(closed).jaxpr.eqns:
        if (name := equation.primitive.name) in ("dot_general", "conv_general_dilated"):
            factors = [spec_of(factor) for factor in equation.invars]
            dtype = max((factor.dtype for factor in factors), key=lambda d: d.itemsize)
            numbers = equation.params["dimension_numbers"]
            if name == "dot_general":
                depth = math.prod(factors[0].shape[axis] for axis in numbers[0][0])
            else:
                depth = factors[1].size // factors[1].shape[numbers.rhs_spec[0]]
            products[dtype.name] += 2 * spec_of(equation.outvars[0]).size * depth
        elif name == SCAN:
            times = equation.params["length"]
            counted, inside, of_products = _operations(equation.params["jaxpr"])
            flops += times * inside - counted
            products.update({dtype: times * count for dtype, count in of_products.items()})
    return once, flops, products


def _flat(closed: ClosedJaxpr, added: int = 0) -> Jaxpr:
    """The program without calls, and without its last results: what is used at once need not be written."""
    flat = without_barriers(inline(closed)).jaxpr
    shorter: Jaxpr = flat.replace(outvars=flat.outvars[: len(flat.outvars) - added])
    return shorter


def _kernels(flat: Jaxpr) -> list[Kernel]:
    """The kernels of a program without calls, in its order.

    Elementwise operations and moves are computed where they are used, in reductions too, but not in products:
    in memory are results of the program, of products and all else that is not fused, and what these read.
    """
    written = _variables(flat.outvars)
    for equation in flat.eqns:
        name = equation.primitive.name
        if name not in FUSED:
            written |= set(equation.outvars)
            if not name.startswith("reduce_"):
                written |= _variables(equation.invars)
    origins: dict[Any, Set[Any]] = {}  # of fused values, what is in memory
    kernels: list[Kernel] = []
    for equation in flat.eqns:
        sources: Set[Any] = frozenset().union(*(origins.get(a, {a}) for a in _variables(equation.invars)))
        if equation.primitive.name == SCAN or any(var in written for var in equation.outvars):
            kernels.append((equation, sources))
        else:
            origins.update(dict.fromkeys(equation.outvars, sources))
    return kernels


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _bytes_moved(flat: Jaxpr) -> float:
    moved = 0.0
    for equation, sources in _kernels(flat):
        results = nbytes([var.aval for var in equation.outvars])
        if equation.primitive.name == SCAN:
            moved += equation.params["length"] * _bytes_moved(_flat(equation.params["jaxpr"]))
        elif equation.primitive.name in ("gather", "dynamic_slice"):  # which read what they give
            moved += 2 * results
        else:
            moved += results + nbytes([atom.aval for atom in sources])
    return moved


def _most_at_once(flat: Jaxpr) -> int:
    """The most bytes that are in memory with one kernel, of what is no argument and no result."""
    kernels, lasting = _kernels(flat), {*flat.invars, *flat.constvars, *_variables(flat.outvars)}
    ends = {atom: place for place, (_, sources) in enumerate(kernels) for atom in sources}
    change = [0] * (len(kernels) + 1)
    inside = [0] * len(kernels)
    for place, (equation, _) in enumerate(kernels):
        for var in equation.outvars:
            if var not in lasting:
                change[place] += nbytes(var.aval)
                change[ends.get(var, place) + 1] -= nbytes(var.aval)
        if equation.primitive.name == SCAN:
            inside[place] = _most_at_once(_flat(equation.params["jaxpr"]))
    return max(map(add, accumulate(change), inside), default=0)


REPEATS = 15


def measured_accelerator(device: jax.Device) -> Accelerator:
    """The rates at which a device multiplies matrices and takes a softmax, as `program_cost` counts them.

    Of CPUs what counts is a core's own time, so that others who use the machine at the moment do not matter;
    XLA must have been told to use one thread, as the launchers tell it.
    """
    cpu = device.platform == "cpu"
    size, rows = (512, 1024) if cpu else (8192, 65536)
    factors = [jax.ShapeDtypeStruct((size, size), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    half, single = (2 * size**3 / _seconds(device, jnp.matmul, own, own) for own in factors)
    scores = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    moved = program_cost(jax.make_jaxpr(jax.nn.softmax)(scores)).bytes
    return Accelerator(
        name="measured",
        half=half,
        single=single,
        bytes_per_second=moved / _seconds(device, jax.nn.softmax, scores),
        memory=memory_limit(device),
        link="loopback",
        source=f"measured on {device.device_kind}",
        together=len(os.sched_getaffinity(0)) if cpu else None,
    )


def _seconds(device: jax.Device, function: Callable[..., Any], *specs: Any) -> float:
    """The lower quartile of a few runs."""
    clock = time.process_time if device.platform == "cpu" else time.perf_counter
    program = Compiler(StageMesh((device,)))(function, *specs)
    arguments = [jax.device_put(jnp.ones(spec.shape, spec.dtype), device) for spec in specs]
    timer = Timer(lambda: jax.block_until_ready(program(*arguments)), timer=clock)
    return sorted(timer.repeat(REPEATS, number=1))[REPEATS // 4]
