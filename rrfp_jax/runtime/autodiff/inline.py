"""A traced program without calls: what `jit`, custom derivatives and `jax.checkpoint` wrap, in one list.

A rematerialised layer computes part of its forward again. JAX puts its arguments, among them the cotangent
that arrives, behind one optimization barrier. That barrier is kept. Without it XLA may begin all layers at
once, long before their cotangents are there, and hold the activations of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

from rrfp_jax.random_keys import as_key, is_key, plain
from rrfp_jax.runtime.autodiff.traced import calls_programs, spec_of

BARRIER = "optimization_barrier"

_CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""Primitives that only call a program, and the parameter in which it is."""


def inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, and no equation of it calls another one (control flow stays as it is).

    Typed keys among the inputs, and from control flow, are made again of their numbers, so that other
    programs can be given the numbers.
    """
    inliner = _Inliner()
    inputs = [Var(var.aval) for var in closed.jaxpr.invars]
    outputs = inliner.call(closed, [inliner.made_again(var) for var in inputs])
    constants = list(inliner.constants)
    flat = closed.jaxpr.replace(constvars=constants, invars=inputs, outvars=outputs, eqns=inliner.equations)
    return ClosedJaxpr(flat, [inliner.constants[var] for var in constants])


def without_barriers(flat: ClosedJaxpr) -> ClosedJaxpr:
    """An inlined program without what only orders its work."""
    names: dict[Any, Any] = {}
    equations = []
    for equation in flat.jaxpr.eqns:
        read = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in equation.invars]
        if equation.primitive.name == BARRIER:
            names.update(zip(equation.outvars, read, strict=True))
        else:
            equations.append(equation.replace(invars=read))
    outputs = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in flat.jaxpr.outvars]
    return ClosedJaxpr(flat.jaxpr.replace(eqns=equations, outvars=outputs), flat.consts)


class _Inliner:
    """Collects equations; every call gets variables of its own."""

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}

    def call(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """Append the program's equations applied to `args`; its outputs."""
        jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
        consts = closed.consts if isinstance(closed, ClosedJaxpr) else []
        known: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            known[var] = Var(var.aval)
            self.constants[known[var]] = value
        for equation in jaxpr.eqns:
            read = [atom if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
            known.update(zip(equation.outvars, self._apply(equation, read), strict=True))
        return [atom if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]

    def _apply(self, equation: JaxprEqn, read: list[Any]) -> Sequence[Any]:
        parameter = _CALLS.get(equation.primitive.name)
        if parameter is None:
            made = [(DropVar if isinstance(v, DropVar) else Var)(v.aval) for v in equation.outvars]
            self.equations.append(equation.replace(invars=read, outvars=made))
            return [*map(self.made_again, made)] if calls_programs(equation) else made
        if equation.params.get("differentiated"):
            read = self._behind_barrier(read, equation.params["prevent_cse"])
        return self.call(equation.params[parameter], read)

    def made_again(self, var: Var) -> Any:
        """A key made again of its numbers; anything else as it is."""
        if not is_key(var.aval) or isinstance(var, DropVar):
            return var
        again = jax.make_jaxpr(lambda key: as_key(var.aval, plain(key)))(var.aval)
        return self.call(again, [var])[0]

    def _behind_barrier(self, read: list[Any], chosen: bool | Sequence[bool]) -> list[Any]:
        flags = [chosen] * len(read) if isinstance(chosen, bool) else chosen
        held = [i for i, flag in enumerate(flags) if flag and not isinstance(read[i], Literal)]
        specs = [spec_of(read[i]) for i in held]
        barrier = jax.make_jaxpr(jax.lax.optimization_barrier)(specs)
        behind = list(read)
        for i, atom in zip(held, self.call(barrier, [read[i] for i in held]), strict=True):
            behind[i] = atom
        return behind
