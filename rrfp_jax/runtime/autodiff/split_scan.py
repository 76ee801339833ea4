"""A loop with outputs for both halves of a split program, as two loops.

    first   carries what the wanted outputs follow from; stacks for each iteration what crosses over
    second  carries the rest (sums over iterations of shared parameters' gradients); reads the stacks

A carry is the first loop's if a wanted output needs it, directly or through other carries of later
iterations. The second loop has such a carry only where the first one stacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from rrfp_jax.runtime._jax import live_part, scan_counts, scan_like
from rrfp_jax.runtime.autodiff.halves import Halves, Source, Where
from rrfp_jax.runtime.sizes import nbytes

Halve: TypeAlias = Callable[[ClosedJaxpr, Sequence[bool], Sequence[Source]], Halves]
Pairs: TypeAlias = Sequence[tuple[Var, Any]]
"""Inputs of a loop's body with the operands that they stand for."""


def split_scan(
    equation: JaxprEqn, wanted: Sequence[bool], sources: Sequence[Source], halve: Halve
) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """The loop as one or two equations, and its outputs that are other names of what the first one stacks.

    Args:
        equation: a scan.
        wanted: for each output, whether the first half needs it.
        sources: for each operand, where it is at hand.
        halve: splits the body.
    """
    n, m = scan_counts(equation)
    early = _early(equation.params["jaxpr"], n, m, wanted)
    halves = halve(equation.params["jaxpr"], early, _body_sources(equation, early, sources))
    first, second = halves.first.jaxpr, halves.second.jaxpr

    pairs = list(zip(first.invars, equation.invars, strict=True))
    constants, carried, scanned = pairs[:n], pairs[n : n + m], pairs[n + m :]
    theirs = [i for i, flag in enumerate(early) if flag]
    stacks: dict[Any, Var] = {  # also wanted, so stacked in any case
        first.outvars[k]: equation.outvars[i]
        for k, i in enumerate(theirs)
        if i >= m and isinstance(first.outvars[k], Var)
    }
    new = [var for var in halves.crossing if var not in stacks]
    stacks.update((var, _stacked(var, equation.params["length"])) for var in new)
    body = ClosedJaxpr(first.replace(outvars=[*first.outvars[: len(theirs)], *new]), halves.first.consts)
    outputs = [*(equation.outvars[i] for i in theirs), *(stacks[var] for var in new)]
    kept = [pair for pair, flag in zip(carried, early, strict=False) if flag]
    loops = [_loop(equation, body, (constants, kept, scanned), outputs)]

    rest = [i for i, flag in enumerate(early) if not flag]
    names = {
        equation.outvars[i]: stacks[atom]
        for i, atom in zip(rest, second.outvars, strict=True)
        if i >= m and isinstance(atom, Var) and atom in stacks
    }
    own = [(equation.outvars[i], atom) for i, atom in zip(rest, second.outvars, strict=True)]
    own = [(outer, atom) for outer, atom in own if outer not in names]
    if own:
        body = ClosedJaxpr(second.replace(outvars=[atom for _, atom in own]), halves.second.consts)
        kept = [pair for pair, flag in zip(carried, early, strict=False) if not flag]
        crossed = [(var, stacks[var]) for var in halves.crossing]
        loops.append(
            _loop(equation, body, (constants, kept, [*scanned, *crossed]), [outer for outer, _ in own])
        )
    return loops, names


def _early(body: ClosedJaxpr, n: int, m: int, wanted: Sequence[bool]) -> list[bool]:
    """Which outputs of the body are the first loop's: `wanted`, and the carries that those need."""
    early = list(wanted)
    while True:
        _, reads = live_part(body, early)
        more = [i - n for i in reads if n <= i < n + m and not early[i - n]]
        if not more:
            return early
        for i in more:
            early[i] = True


def _body_sources(equation: JaxprEqn, early: Sequence[bool], sources: Sequence[Source]) -> list[Source]:
    """The operands as inputs of the body; bytes are those of one iteration."""
    body, length = equation.params["jaxpr"], equation.params["length"]
    n, m = scan_counts(equation)
    reads = set(live_part(body, early)[1])
    following = any(source.cotangent for source in sources)
    inside = []
    for i, (source, var) in enumerate(zip(sources, body.jaxpr.invars, strict=True)):
        if n <= i < n + m:
            inside.append(Source(Where.FIRST if early[i - n] else Where.SECOND, nbytes(var.aval), following))
        else:
            only_second = source.where is Where.SECOND and i not in reads
            where = Where.SECOND if only_second else Where.BOTH
            inside.append(Source(where, source.held // max(length, 1), source.cotangent))
    return inside


def _loop(
    equation: JaxprEqn, body: ClosedJaxpr, parts: tuple[Pairs, Pairs, Pairs], outputs: Sequence[Var]
) -> JaxprEqn:
    """A scan without the constants and scanned operands that its body does not read."""
    constants, carried, scanned = parts
    flat = body.jaxpr.replace(invars=[inner for part in parts for inner, _ in part])
    every, reads = live_part(ClosedJaxpr(flat, body.consts), [True] * len(outputs))
    read = {flat.invars[i] for i in reads}
    constants = [pair for pair in constants if pair[0] in read]
    scanned = [pair for pair in scanned if pair[0] in read]
    kept = (constants, list(carried), scanned)
    closed = every.jaxpr.replace(invars=[inner for part in kept for inner, _ in part])
    operands = [[outer for _, outer in part] for part in kept]
    return scan_like(equation, ClosedJaxpr(closed, body.consts), operands, outputs)


def _stacked(var: Var, length: int) -> Var:
    one: Any = var.aval
    return Var(one.update(shape=(length, *one.shape), weak_type=False))
