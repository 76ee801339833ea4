"""What a traced program costs, found without compiling it: no device is touched.

Operations are what XLA's analysis counts before it compiles. Its count of bytes is of no use then, because it
has every operation read and write memory, and a compiled program fuses most of them. So bytes are counted
here, as if elementwise operations and moves were computed where they are used, in reductions too, but not in
products:

    written     results of the program, of products and all else that is not fused, and what these read
    read        by each of them, and by each reduction, whatever is written of what it follows from

XLA counts the body of a loop once. Here the body of a scan is analysed by itself and counted as often as it
runs. A loop of unknown length counts once. What a custom kernel does is not known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from rrfp_jax.runtime.autodiff.inline import inline, without_barriers
from rrfp_jax.runtime.autodiff.traced import REPEATABLE, spec_of
from rrfp_jax.runtime.sizes import nbytes

FUSED = REPEATABLE | {
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erf_inv", "sin", "cos", "pow"),
    *("sqrt", "rsqrt", "cbrt", "floor", "ceil", "round", "rem", "is_finite", "stop_gradient"),
}
"""Primitives that are computed where they are used."""

IN_PLACE = FUSED | {"scatter-add", "scatter", "dynamic_update_slice"}
"""Primitives whose result may take the place of what they read last."""

SCAN = "scan"


@dataclass(frozen=True)
class ProgramCost:
    """What one run of a program takes.

    Attributes:
        flops: operations, by the dtype of the matrix products that most of them belong to.
        bytes: moved between memory and processor.
        temporary_bytes: held while it runs, besides arguments and results, if what is in memory is kept to
            its last use.
    """

    flops: Mapping[str, float]
    bytes: float
    temporary_bytes: int


def program_cost(closed: ClosedJaxpr) -> ProgramCost:
    """The cost of a program."""
    flops, products = _operations(closed)
    whole = sum(products.values())
    shares = {dtype: n / whole for dtype, n in products.items()} if whole else {"float32": 1.0}
    return ProgramCost(
        flops={dtype: flops * share for dtype, share in shares.items()},
        bytes=_bytes_moved(closed),
        temporary_bytes=_temporary_bytes(closed),
    )


def _operations(closed: ClosedJaxpr) -> tuple[float, Counter[str]]:
    """How many, as XLA counts them, and those of products by their dtype."""
    specs = [spec_of(var) for var in closed.jaxpr.invars]
    analysis = _lowered(closed, specs).cost_analysis() or {}
    flops, products = analysis.get("flops", 0.0), Counter[str]()
    for equation in inline(closed).jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            dtype = max((atom.aval.dtype for atom in equation.invars), key=lambda d: d.itemsize)
            contracted, _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted[0])
            products[dtype.name] += 2 * equation.outvars[0].aval.size * depth
        elif equation.primitive.name == SCAN:
            times, (inside, of_products) = equation.params["length"], _operations(equation.params["jaxpr"])
            flops += (times - 1) * inside
            products.update({dtype: times * count for dtype, count in of_products.items()})
    return flops, products


def _lowered(closed: ClosedJaxpr, specs: Sequence[Any]) -> jax.stages.Lowered:
    """For this process's devices; with kernels of cuDNN, which only GPUs have, for those."""
    traced: Any = jax.jit(jaxpr_as_fun(closed)).trace(*specs)
    lowered: jax.stages.Lowered
    try:
        lowered = traced.lower()
    except NotImplementedError:
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered


def _bytes_moved(closed: ClosedJaxpr) -> float:
    moved = 0.0
    for equation, sources in _groups(without_barriers(inline(closed)).jaxpr):
        if equation.primitive.name == SCAN:
            moved += equation.params["length"] * _bytes_moved(equation.params["jaxpr"])
        else:
            moved += _equation_bytes(equation, sources)
    return moved


def _groups(flat: Jaxpr) -> Iterator[tuple[JaxprEqn, Set[Any]]]:
    """Every equation that ends a fused group, in their order, with what of memory the group reads."""
    written = _read(flat.outvars)  # values that are in memory at some time
    for equation in flat.eqns:
        name = equation.primitive.name
        if name not in FUSED:
            written |= set(equation.outvars)
            if not name.startswith("reduce_"):
                written |= _read(equation.invars)
    origins: dict[Any, Set[Any]] = {}  # of fused values, what is in memory
    for equation in flat.eqns:
        sources: Set[Any] = frozenset().union(*(origins.get(a, {a}) for a in _read(equation.invars)))
        if equation.primitive.name == SCAN or any(var in written for var in equation.outvars):
            yield equation, sources
        else:
            origins.update(dict.fromkeys(equation.outvars, sources))


def _equation_bytes(equation: JaxprEqn, sources: Set[Any]) -> float:
    """What a fused group that ends with this equation reads and writes."""
    results = nbytes([var.aval for var in equation.outvars])
    if equation.primitive.name in ("gather", "dynamic_slice"):  # which read what they give
        return 2 * results
    return results + nbytes([atom.aval for atom in sources])


def _temporary_bytes(closed: ClosedJaxpr) -> int:
    """The most bytes of intermediate results that are in memory at once, fused groups taken in their order.

    Some may write in the place of what they read last; see `IN_PLACE`.
    """
    flat = without_barriers(inline(closed)).jaxpr
    kept = {*flat.invars, *flat.constvars, *_read(flat.outvars)}
    groups = list(_groups(flat))
    last_use = {atom: place for place, (_, sources) in enumerate(groups) for atom in sources}
    held = most = 0
    for place, (equation, sources) in enumerate(groups):
        inside = _temporary_bytes(equation.params["jaxpr"]) if equation.primitive.name == SCAN else 0
        made = [nbytes(var.aval) for var in equation.outvars if var in last_use and var not in kept]
        ended = [nbytes(atom.aval) for atom in sources if last_use[atom] == place and atom not in kept]
        in_place = Counter(made) & Counter(ended) if equation.primitive.name in IN_PLACE else Counter[int]()
        most = max(most, held + sum(made) - sum(in_place.elements()) + inside)
        held += sum(made) - sum(ended)
    return most


def _read(atoms: Any) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}
