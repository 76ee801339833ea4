"""What a gradient reaches: which inputs of a traced function have a cotangent, and from which outputs.

JAX computes no cotangent for a value that only feeds a metric, `stop_gradient`, rounding or a comparison, so
that the loss does not follow from it differentiably. A cotangent of zeros would be something else: times an
infinite derivative, as of `sqrt` at 0, it is not a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params

from rrfp_jax.runtime._jax import line_of
from rrfp_jax.runtime.autodiff.dataflow import output_dependence
from rrfp_jax.runtime.autodiff.traced import spec_of

_STILL = frozenset(["stop_gradient", "round", "floor", "ceil", "sign", "nextafter"])
"""Primitives whose derivative is zero everywhere. JAX gives what they make no tangent at all."""

_CALLS = frozenset(["jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"])
"""Primitives that only call a program. Functions with a derivative of their own are not among them."""


_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "is_finite"])


def is_differentiable(leaf: Any) -> bool:
    """Whether values of its dtype have tangents."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def may_move(closed: ClosedJaxpr, moving: Sequence[bool]) -> list[bool]:
    """Which outputs can have a tangent if these inputs have; at times more than do, never fewer."""
    return _may_move(closed.jaxpr, moving, [])


@dataclass(frozen=True)
class End:
    """An equation that takes values with a tangent and gives none.

    Attributes:
        equation: itself.
        outer: the equation of the whole program that it is part of.
        line: in user code; empty if not known.
    """

    equation: JaxprEqn
    outer: JaxprEqn
    line: str

    @property
    def name(self) -> str:
        """What it does, for messages."""
        name, made = self.equation.primitive.name, self.equation.outvars[0].aval
        if name == "convert_element_type":
            return f"a cast to {made.dtype}"  # type: ignore[attr-defined]
        return name if is_differentiable(made) else f"{name}, which gives {made.dtype}"  # type: ignore[attr-defined]


def end_of_motion(jaxpr: Any, moving: Sequence[bool]) -> End | None:
    """Where tangents end in a program; what is meant to end them comes first."""
    ends: list[End] = []
    _may_move(jaxpr, moving, ends)
    return min(ends, key=_rank, default=None)


def _rank(end: End) -> int:
    """How likely an equation is the one that users have to look at; comparisons are mostly masks."""
    name = end.equation.primitive.name
    return 0 if name in _STILL else 1 if name == "convert_element_type" else 3 if name in _COMPARISONS else 2


def _may_move(jaxpr: Any, moving: Sequence[bool], ends: list[End]) -> list[bool]:
    """See `may_move`; `ends` gets the equations at which tangents end."""
    known = {v for v, moves in zip(jaxpr.invars, moving, strict=True) if moves and is_differentiable(v.aval)}
    for equation in jaxpr.eqns:
        read = [not isinstance(atom, Literal) and atom in known for atom in equation.invars]
        if not any(read):
            continue
        bodies = list(jaxprs_in_params(equation.params))
        if equation.primitive.name in _STILL:
            flags = [False] * len(equation.outvars)
        elif equation.primitive.name in _CALLS and len(bodies) == 1:
            inner: list[End] = []
            flags = _may_move(bodies[0], read, inner)
            ends += [End(end.equation, equation, end.line or line_of(equation)) for end in inner]
        else:
            flags = [True] * len(equation.outvars)
        moves = [flag and is_differentiable(v.aval) for v, flag in zip(equation.outvars, flags, strict=True)]
        known.update(v for v, flag in zip(equation.outvars, moves, strict=True) if flag)
        if not any(moves) and equation.primitive.name not in _CALLS:
            ends.append(End(equation, equation, line_of(equation)))
    return [not isinstance(atom, Literal) and atom in known for atom in jaxpr.outvars]


def reached(closed: ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """For each of these inputs, the mask of those of the given outputs whose cotangents reach it.

    Args:
        closed: the function.
        inputs, outputs: indices of differentiable ones; bit k of a mask is for `outputs[k]`.

    Raises:
        Exception: whatever JAX raises if there is no such derivative.
    """
    specs = [spec_of(v) for v in closed.jaxpr.invars]
    cotangents = [spec_of(closed.jaxpr.outvars[i]) for i in outputs]
    function = jaxpr_as_fun(closed)

    def pulled_back(values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def chosen(*own: Any) -> list[Any]:
            filled = {**dict(enumerate(values)), **dict(zip(inputs, own, strict=True))}
            found = function(*(filled[i] for i in range(len(specs))))
            return [found[i] for i in outputs]

        return jax.vjp(chosen, *(values[i] for i in inputs))[1](list(cotangents))

    traced = jax.make_jaxpr(pulled_back)(specs, cotangents)
    return [mask >> len(specs) for mask in output_dependence(traced)]
