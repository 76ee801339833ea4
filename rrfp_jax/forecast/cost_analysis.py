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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rrfp_jax.forecast.fusion import SCAN, Group, fused_groups, without_last
from rrfp_jax.forecast.temporaries import Temporaries, temporaries_of
from rrfp_jax.runtime.autodiff.traced import inline, spec_of, without_barriers
from rrfp_jax.runtime.sizes import nbytes


@dataclass(frozen=True)
class ProgramCost:
    """What one run of a program takes.

    Attributes:
        flops: operations, by the dtype of the matrix products that most of them belong to.
        bytes: moved between memory and processor.
        temporaries: held while it runs, besides arguments and results.
    """

    flops: Mapping[str, float]
    bytes: float
    temporaries: Temporaries

    @property
    def temporary_bytes(self) -> int:
        """The most of them at once."""
        return self.temporaries.most()


def program_cost(closed: ClosedJaxpr, added: int = 0) -> ProgramCost:
    """The cost of a program, without the addition of its last results to sums; see `temporary_bytes`."""
    flops, products = _operations(closed)
    whole = sum(products.values())
    shares = {dtype: n / whole for dtype, n in products.items()} if whole else {"float32": 1.0}
    return ProgramCost(
        flops={dtype: flops * share for dtype, share in shares.items()},
        bytes=_bytes_moved(closed, added),
        temporaries=temporaries_of(closed, added),
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


def _bytes_moved(closed: ClosedJaxpr, added: int = 0) -> float:
    moved = 0.0
    for group in fused_groups(without_last(without_barriers(inline(closed)).jaxpr, added)):
        if group.name == SCAN:
            moved += group.equation.params["length"] * _bytes_moved(group.equation.params["jaxpr"])
        else:
            moved += _group_bytes(group)
    return moved


def _group_bytes(group: Group) -> float:
    """What it reads and writes."""
    results = nbytes([var.aval for var in group.equation.outvars])
    if group.name in ("gather", "dynamic_slice"):  # which read what they give
        return 2 * results
    return results + nbytes([atom.aval for atom in group.sources])
