"""Which operations of a traced program are one kernel: what is elementwise is computed where it is used."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from rrfp_jax.runtime.autodiff.traced import REPEATABLE

FUSED = REPEATABLE | {
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erf_inv", "sin", "cos", "pow"),
    *("sqrt", "rsqrt", "cbrt", "floor", "ceil", "round", "rem", "is_finite", "stop_gradient"),
}
"""Primitives that are computed where they are used."""

SCAN = "scan"


class Group(NamedTuple):
    """Operations that are one kernel.

    Attributes:
        equation: the last of them, whose results are written to memory.
        sources: what they read of it.
    """

    equation: JaxprEqn
    sources: Set[Any]

    @property
    def name(self) -> str:
        """Of the primitive that ends it."""
        return str(self.equation.primitive.name)

    @property
    def reduces(self) -> bool:
        """Whether it ends with a sum, a maximum or the like."""
        return self.name.startswith("reduce_")


def fused_groups(flat: Jaxpr) -> Iterator[Group]:
    """All groups of a program without calls, in its order.

    Elementwise operations and moves are computed where they are used, in reductions too, but not in products:
    in memory are results of the program, of products and all else that is not fused, and what these read.
    """
    written = read(flat.outvars)  # values that are in memory at some time
    for equation in flat.eqns:
        name = equation.primitive.name
        if name not in FUSED:
            written |= set(equation.outvars)
            if not name.startswith("reduce_"):
                written |= read(equation.invars)
    origins: dict[Any, Set[Any]] = {}  # of fused values, what is in memory
    for equation in flat.eqns:
        sources: Set[Any] = frozenset().union(*(origins.get(a, {a}) for a in read(equation.invars)))
        if equation.primitive.name == SCAN or any(var in written for var in equation.outvars):
            yield Group(equation, sources)
        else:
            origins.update(dict.fromkeys(equation.outvars, sources))


def without_last(flat: Jaxpr, results: int) -> Jaxpr:
    """The program without so many of its last results: what is used at once need not be written."""
    found: Jaxpr = flat.replace(outvars=flat.outvars[: len(flat.outvars) - results])
    return found


def read(atoms: Any) -> set[Any]:
    """The variables among what an equation reads."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}
