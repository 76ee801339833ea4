"""Traced programs that read a part of an argument list, and which of their equations are cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from rrfp_jax.random_keys import is_key
from rrfp_jax.runtime._jax import live_part

Specs: TypeAlias = Sequence[jax.ShapeDtypeStruct]

CHEAP = frozenset(
    [
        *("add", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square", "integer_pow", "clamp"),
        *("select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
        *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy"),
    ]
)
"""Elementwise primitives whose results are computed again rather than saved (no transcendental ones)."""

REPEATABLE = CHEAP | {
    *("add_any", "iota", "transpose", "rev", "slice", "concatenate", "split", "pad"),
}
"""These, and moves: what both halves of a split backward may do."""


def calls_programs(equation: JaxprEqn) -> bool:
    """Whether an equation is control flow, or calls another program."""
    return any(True for _ in jaxprs_in_params(equation.params))


def is_repeatable(equation: JaxprEqn) -> bool:
    """Whether several programs may compute an equation; those that make random keys are, too.

    No program gives another one typed keys: they are made again from their numbers.
    """
    makes_keys = all(is_key(var.aval) for var in equation.outvars) and not calls_programs(equation)
    return equation.primitive.name in REPEATABLE or makes_keys


SCALE = jax.ShapeDtypeStruct((), np.float32)
"""Spec of the loss scale: the loss's own cotangent, by which a traced backward begins."""


@dataclass(frozen=True)
class Program:
    """A traced program and which entries of its full argument list it reads."""

    closed: ClosedJaxpr
    reads: tuple[int, ...]

    def __call__(self, *args: Any) -> list[Any]:
        """Apply it to the arguments that it reads."""
        return jaxpr_as_fun(self.closed)(*args)  # type: ignore[no-any-return]

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of the arguments that it reads."""
        return [spec_of(var) for var in self.closed.jaxpr.invars]

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of what it gives."""
        return [spec_of(var) for var in self.closed.jaxpr.outvars]


def spec_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The spec of a variable's or literal's value; weak types stay weak, as promotion depends on them."""
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def reduce(closed: ClosedJaxpr, outputs: Sequence[bool] | None = None) -> Program:
    """The program with only the chosen outputs, and no more inputs than they need."""
    live, reads = live_part(closed, outputs or [True] * len(closed.jaxpr.outvars))
    return Program(live, tuple(reads))


def quiet(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program without equations that its outputs do not need, such as a print, which `reduce` keeps.

    What is computed apart from the forward must not read a microbatch, or print, for the sake of one.
    """
    needed = {atom for atom in closed.jaxpr.outvars if not isinstance(atom, Literal)}
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=kept[::-1]), closed.consts)


def with_given(closed: ClosedJaxpr, known: Sequence[Var], at: int, outputs: Sequence[Any]) -> ClosedJaxpr:
    """The program with the values of `known` as further inputs, from position `at` on, and other outputs."""
    jaxpr, given, equations = closed.jaxpr, set(known), []
    for equation in jaxpr.eqns:
        if not any(var in given for var in equation.outvars):
            equations.append(equation)
        elif not all(var in given or isinstance(var, DropVar) for var in equation.outvars):
            rest = [DropVar(var.aval) if var in given else var for var in equation.outvars]
            equations.append(equation.replace(outvars=rest))
    inputs = [*jaxpr.invars[:at], *known, *jaxpr.invars[at:]]
    return ClosedJaxpr(jaxpr.replace(invars=inputs, outvars=list(outputs), eqns=equations), closed.consts)
