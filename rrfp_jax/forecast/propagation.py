"""How the values of a program lie on the devices of a stage.

XLA asks Shardy (openxla.org/shardy) before it compiles, and so does this. From the shardings of a program's
arguments and results Shardy derives those of all values in between. Its passes come with JAX, and need no
devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy

Layout: TypeAlias = tuple[int, ...]
"""By dimension of an array, how many devices share it."""

PIPELINE = "builtin.module(sdy-propagation-pipeline)"

SHARDING = "sdy.sharding"
"""The attribute of a result; one that is whole may lack it."""


def layouts(flat: ClosedJaxpr, specs: Sequence[Any], out: Sequence[Any]) -> dict[Any, Layout]:
    """Of every variable of a program without calls.

    Args:
        flat: the program.
        specs: of its arguments, with their shardings on one mesh.
        out: the shardings of its results; None where that is the compiler's to choose.
    """
    jaxpr = flat.jaxpr
    inner = [var for own in jaxpr.eqns for var in own.outvars if not isinstance(var, DropVar)]
    every = ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars, *inner]), flat.consts)
    program = jax.jit(jaxpr_as_fun(every), keep_unused=True, out_shardings=[*out, *[None] * len(inner)])
    lowered = program.trace(*specs).lower(lowering_platforms=("cuda",))
    sizes = specs[0].sharding.mesh.shape if specs else {}
    found = _of_results(lowered.compiler_ir(), sizes)
    known: dict[Any, Layout] = {var: layout_of(spec) for var, spec in zip(jaxpr.invars, specs, strict=True)}
    known |= {var: whole(var) for var in jaxpr.constvars}
    for var, layout in zip(every.jaxpr.outvars, found, strict=True):
        if not isinstance(var, Literal):
            known.setdefault(var, layout or whole(var))
    return known


def layout_of(spec: Any) -> Layout:
    """Of a spec with a sharding."""
    parts = spec.sharding.shard_shape(spec.shape)
    return tuple(size // part if part else 1 for size, part in zip(spec.shape, parts, strict=True))


def whole(var: Any) -> Layout:
    """Of a value that every device has."""
    return (1,) * len(var.aval.shape)


def _of_results(module: Any, sizes: Mapping[str, int]) -> list[Layout | None]:
    """Of the results of a lowered program; None for those of which nothing is said."""
    with module.context:
        passmanager.PassManager.parse(PIPELINE).run(module.operation)
        results: Any = ir.SymbolTable(module.operation)["main"].attributes["res_attrs"]
        return [
            _layout(sdy.TensorShardingAttr(own[SHARDING]), sizes) if SHARDING in own else None
            for own in map(ir.DictAttr, results)
        ]


def _layout(sharding: Any, sizes: Mapping[str, int]) -> Layout:
    return tuple(
        math.prod(_size(axis, sizes) for axis in map(sdy.AxisRefAttr, map(ir.Attribute, dimension.axes)))
        for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
    )


def _size(axis: Any, sizes: Mapping[str, int]) -> int:
    """Of an axis of the mesh, or the part of one that a dimension is spread over."""
    return int(
        sizes[axis.name] if axis.sub_axis_info is None else sdy.SubAxisInfoAttr(axis.sub_axis_info).size
    )
