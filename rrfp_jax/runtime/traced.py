"""Traced programs that read a part of an argument list, and which of their equations are cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

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


def spec_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The spec of a variable's or literal's value."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def reduce(closed: ClosedJaxpr, outputs: Sequence[bool] | None = None) -> Program:
    """The program with only the chosen outputs, and no more inputs than they need."""
    live, reads = live_part(closed, outputs or [True] * len(closed.jaxpr.outvars))
    return Program(live, tuple(reads))
