"""Which inputs each value of a traced program depends on, exactly, through calls and loops.

Sets of inputs are bit masks (bit i: input i), since a program has hundreds of inputs and thousands of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, DropVar, Literal, Var, jaxprs_in_params

from rrfp_jax.runtime._jax import live_part
from rrfp_jax.runtime.autodiff.purity import runs_once


def dependence(closed: ClosedJaxpr) -> dict[Var, int]:
    """For every variable of the program, the mask of the inputs that can change it.

    What a function on the host gives, and all that follows from it, has one more bit, `1 << len(inputs)`: it
    follows from more than the inputs.
    """
    jaxpr = closed.jaxpr
    known: dict[Var, int] = {var: 1 << i for i, var in enumerate(jaxpr.invars)}
    known.update((var, 0) for var in jaxpr.constvars)
    host = 1 << len(jaxpr.invars)
    for equation in jaxpr.eqns:
        more = host if runs_once(equation) else 0
        masks = [mask | more for mask in _outputs(jaxpr, equation, known)]
        known.update(zip(equation.outvars, masks, strict=True))
    return known


def output_dependence(closed: ClosedJaxpr) -> list[int]:
    """The mask of every output of the program."""
    known = dependence(closed)
    return [0 if isinstance(atom, Literal) else known[atom] for atom in closed.jaxpr.outvars]


def _outputs(jaxpr: Any, equation: Any, known: dict[Var, int]) -> list[int]:
    """The masks of an equation's outputs; of a call or loop, each output's own."""
    read = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
    together = _union(known[var] for var in read)
    outputs = equation.outvars
    distinct = {known[var] for var in read if known[var]}
    if len(outputs) == 1 or len(distinct) < 2 or not any(True for _ in jaxprs_in_params(equation.params)):
        return [together] * len(outputs)
    masks = []
    for var in outputs:
        if isinstance(var, DropVar):
            masks.append(0)
            continue
        alone = jaxpr.replace(constvars=[], invars=read, outvars=[var], eqns=[equation])
        _, live = live_part(ClosedJaxpr(alone, []), [True])
        masks.append(_union(known[read[i]] for i in live))
    return masks


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
