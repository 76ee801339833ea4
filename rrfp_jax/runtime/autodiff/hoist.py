"""What a backward computes from weights alone: taken out of it, and computed once a step.

Without rematerialisation such values are residuals of the forward, which `differentiate` finds. A
rematerialised layer computes them again for every microbatch. If both halves of a split backward read such a
value, each microbatch between them would hold it, which is a copy of the weights. Cheap arithmetic stays
where it is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var

from rrfp_jax.runtime.autodiff.inline import BARRIER, inline, without_barriers
from rrfp_jax.runtime.autodiff.purity import runs_once
from rrfp_jax.runtime.autodiff.traced import Program, Specs, is_repeatable, quiet, reduce, with_given


def hoist(backward: Program, fixed: int) -> tuple[Program, Program | None]:
    """Take out of a program what follows from the head of its argument list by more than cheap arithmetic.

    Args:
        backward: the program.
        fixed: the length of that head.

    Returns:
        The rest of the program, whose argument list has the values taken out right after the head; and the
        program that computes them from the head. The program itself and None if there are none.
    """
    flat = inline(backward.closed)
    taken = _costly(flat, [v for i, v in zip(backward.reads, flat.jaxpr.invars, strict=True) if i < fixed])
    if not taken:
        return backward, None
    bare = without_barriers(flat)
    early = reduce(quiet(ClosedJaxpr(bare.jaxpr.replace(outvars=taken), bare.consts)))
    head = sum(i < fixed for i in backward.reads)
    places = [i if i < fixed else i + len(taken) for i in backward.reads]
    places[head:head] = range(fixed, fixed + len(taken))
    rest = reduce(with_given(flat, taken, head, flat.jaxpr.outvars))
    return (
        Program(rest.closed, tuple(places[i] for i in rest.reads)),
        Program(early.closed, tuple(backward.reads[i] for i in early.reads)),
    )


def _costly(flat: ClosedJaxpr, weights: list[Var]) -> list[Var]:
    """The values made from weights, not cheaply, that something else is made from."""
    constant: set[Any] = set(flat.jaxpr.constvars)
    known: set[Any] = set(weights)
    costly: dict[Any, None] = {}
    read_by_others = {v for v in flat.jaxpr.outvars if not isinstance(v, Literal)}
    for equation in flat.jaxpr.eqns:
        read = [v for v in equation.invars if not isinstance(v, Literal)]
        if equation.primitive.name == BARRIER:
            pairs = zip(equation.invars, equation.outvars, strict=True)
            known.update(made for v, made in pairs if v in read and v in known)
            continue
        if runs_once(equation) or not all(v in known or v in constant for v in read):
            read_by_others.update(read)
        elif not any(v in known for v in read):
            constant.update(equation.outvars)
        elif is_repeatable(equation):
            known.update(equation.outvars)
            read_by_others.update(read)
        else:
            known.update(equation.outvars)
            costly.update(dict.fromkeys(equation.outvars))
    return [v for v in costly if v in read_by_others]


def prepared_too(prepare: Program | None, early: Program, params: Specs) -> Program:
    """`prepare` with the values that `early` makes of parameters and its own values after these."""

    def both(*args: Any) -> list[Any]:
        made = prepare(*(args[i] for i in prepare.reads)) if prepare is not None else []
        head = [*args, *made]
        return [*made, *early(*(head[i] for i in early.reads))]

    return reduce(jax.make_jaxpr(both)(*params))
