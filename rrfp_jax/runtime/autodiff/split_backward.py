"""A stage's backward in two programs: the gradient that the stage before waits for, then the rest.

    input   I   gradients of the carry, and values on the way there that the second program needs ("crossing")
    weight  W   gradients of the parameters

Both come from the equations of the one traced backward. So the model knows nothing of it, and no product,
reduction or transcendental function is computed twice. How the equations are dealt out:

1. Calls are inlined (`inline.py`): a rematerialised layer is one equation otherwise, all of it in I.
2. What the carry gradients need is in I. A loop that gives both kinds is split into two loops first
   (`split_scan.py`). Other control flow stays whole, and is in I if I needs any of it.
3. Products, convolutions and the like that follow from a cotangent and that I does not need are in W.
4. What lies between is placed where a microbatch holds the fewest bytes from I to W, by a minimum cut:
   - A value that I has and W needs is held, which costs its bytes. An argument of the stage that W reads is
     held, too. Parameters and prepared values are there anyway.
   - Cheap arithmetic of I may be computed again in W, if that holds less (`REPEATABLE`): XLA fuses it.
   - What only W needs and is no product may be done in I already. Examples are the sum over rows behind a
     norm's scale, which replaces two activations by one row, and the forward's products that remat repeats.

   Each such move is charged 1/64 of the bytes it makes, so that ties are computed once, and in W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr

from rrfp_jax.runtime.autodiff.halves import Source, Where
from rrfp_jax.runtime.autodiff.partition import halve
from rrfp_jax.runtime.autodiff.traced import Program, reduce
from rrfp_jax.runtime.sizes import nbytes


@dataclass(frozen=True)
class Split:
    """A backward as two programs.

    Attributes:
        input: reads a part of the backward's argument list; -> carry gradients, crossing.
        weight: reads a part of that list followed by `input`'s outputs; -> gradients of the parameters.
    """

    input: Program
    weight: Program


def split(backward: Program, flowing: int, fixed: int, cotangents: int, arriving: int) -> Split:
    """A stage's backward as I and W.

    Args:
        backward: traced, giving carry gradients and then parameter gradients.
        flowing: the number of carry gradients.
        fixed: how many entries at the head of its argument list are there anyway (parameters, prepared).
        cotangents: index of the first cotangent in that list.
        arriving: how many cotangents there are; the list ends with them, and they with the loss scale.
    """
    end = cotangents + arriving
    sources = [
        Source(Where.BOTH, 0 if i < fixed or i == end - 1 else nbytes(var.aval), i >= cotangents)
        for i, var in zip(backward.reads, backward.closed.jaxpr.invars, strict=True)
    ]
    outputs = len(backward.closed.jaxpr.outvars)
    halves = halve(backward.closed, [i < flowing for i in range(outputs)], sources)
    first = halves.first.jaxpr
    sent = first.outvars[:flowing]
    given = [*sent, *(var for var in halves.crossing if var not in sent)]  # what is sent on is not held twice
    places = [*backward.reads, *(end + given.index(var) for var in halves.crossing)]
    return Split(
        input=_reading(ClosedJaxpr(first.replace(outvars=given), halves.first.consts), backward.reads),
        weight=_reading(halves.second, places),
    )


def _reading(closed: ClosedJaxpr, places: Sequence[int]) -> Program:
    """The program without inputs that it does not read; `places` are those of its inputs in the list."""
    program = reduce(closed)
    return Program(program.closed, tuple(places[i] for i in program.reads))
