"""Keys of traced programs: of those with equal keys only one need be lowered.

Programs are equal that have the same equations for values of the same types, read in the same order. Small
constants are compared by value; large ones, functions and whatever else JAX cannot hash, by identity.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var

from rrfp_jax.random_keys import plain
from rrfp_jax.runtime._jax import settings_here
from rrfp_jax.runtime.sizes import nbytes

LARGEST_BYTES = 1 << 20
"""Of a constant whose value is looked at: what a layer begins with may be a whole checkpoint."""

RULES = {"custom_jvp_call": ("call_jaxpr",), "custom_vjp_call": ("call_jaxpr",)}
"""Primitives of which only these parameters are lowered; the others are made anew by every trace."""


@dataclass(frozen=True, eq=False)
class Itself:
    """Stands for an object that is equal to nothing else, and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def traced_key(traced: jax.stages.Traced) -> Hashable:
    """The key of what a function was traced to, under JAX's settings on this thread."""
    settings = [(id(state), repr(value)) for state, value in settings_here()]
    everywhere = repr(sorted(jax.config.values.items()))
    donated = tuple(leaf.donated for leaf in jax.tree.leaves(traced.args_info))
    trees = jax.tree.structure(traced.args_info), jax.tree.structure(traced.out_info)
    return program_key(traced.jaxpr), traced.fun_name, trees, donated, tuple(settings), everywhere


def program_key(closed: ClosedJaxpr) -> Hashable:
    """The key of a program, with its constants."""
    with jax.transfer_guard_device_to_host("allow"):
        return _of(closed)


def _of_jaxpr(jaxpr: Jaxpr) -> Hashable:
    numbers: dict[Var, int] = {}

    def bound(var: Any) -> Hashable:
        numbers[var] = len(numbers)
        return var.aval, isinstance(var, DropVar)

    def read(atom: Any) -> Hashable:
        return (_of(atom.val), atom.aval) if isinstance(atom, Literal) else numbers[atom]

    given = tuple(map(bound, [*jaxpr.constvars, *jaxpr.invars])), len(jaxpr.constvars)
    equations = list[Hashable]()
    for own in jaxpr.eqns:
        names = RULES.get(own.primitive.name, sorted(own.params))
        params = tuple((name, _of(own.params[name])) for name in names)
        operands = tuple(map(read, own.invars))
        equations.append((own.primitive, operands, params, tuple(map(bound, own.outvars)), own.ctx))
    return given, tuple(equations), tuple(map(read, jaxpr.outvars))


def _of(value: Any) -> Hashable:
    found = value
    match value:
        case ClosedJaxpr():
            found = _of_jaxpr(value.jaxpr), tuple(map(_of, value.consts))
        case Jaxpr():
            found = _of_jaxpr(value)
        case np.ndarray() | np.generic() | jax.Array():
            if isinstance(value, jax.core.Tracer) or value.dtype == object or nbytes([value]) > LARGEST_BYTES:
                return Itself(value)
            raw = np.asarray(plain(value))  # type: ignore[arg-type]
            found = str(value.dtype), value.shape, getattr(value, "weak_type", False), raw.tobytes()
        case tuple() | list():
            found = type(value), tuple(map(_of, value))
        case Mapping():
            found = tuple((name, _of(value[name])) for name in sorted(value, key=repr))
        case bool() | int() | float() | complex():  # 1 == True == 1.0, and 0.0 == -0.0
            found = type(value), repr(value)
    try:
        hash(found)
    except TypeError:
        return Itself(value)
    return found  # type: ignore[no-any-return]
