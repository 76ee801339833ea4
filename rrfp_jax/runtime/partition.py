"""Dealing out the equations of a program to two halves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

from rrfp_jax.runtime.differentiate import CHEAP, LOSS_COTANGENT
from rrfp_jax.runtime.halves import Halves, Source, Where, nbytes
from rrfp_jax.runtime.inline import BARRIER, inline
from rrfp_jax.runtime.mincut import SINK, SOURCE, Network
from rrfp_jax.runtime.splitscan import split_scan

_REPEATABLE = CHEAP | {
    *("add_any", "iota", "transpose", "rev", "slice", "concatenate", "split", "pad"),
}
"""Arithmetic and moves that both programs may do: an element costs a few operations at most."""

_LIGHT = _REPEATABLE | {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "cumsum"),
    *("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "sin", "cos", "pow"),
    *(
        "sqrt",
        "rsqrt",
        "cbrt",
        "dynamic_slice",
        "gather",
        "dynamic_update_slice",
        "reduce_precision",
        "stop_gradient",
    ),
}
"""What may be done in I for W's sake: its time is that of reading its operands."""

_CHARGE = 64
"""A byte held costs as much as this many bytes computed again or early."""


def halve(closed: ClosedJaxpr, wanted: Sequence[bool], sources: Sequence[Source]) -> Halves:
    """Split a program into what its wanted outputs need, and the rest.

    Args:
        closed: the program.
        wanted: for each output, whether the first half gives it.
        sources: one for each input.
    """
    closed = inline(closed)
    plan = _Plan(closed, wanted, sources)
    crossing = plan.crossing()
    jaxpr = closed.jaxpr
    early = [atom for atom, chosen in zip(jaxpr.outvars, wanted, strict=True) if chosen]
    late = [plan.root(atom) for atom, chosen in zip(jaxpr.outvars, wanted, strict=True) if not chosen]
    first = _slice(plan.equations, [*early, *crossing], set(), plan.alias)
    given = {*crossing, *jaxpr.invars, *jaxpr.constvars}
    second = _slice(plan.equations, late, given, plan.roots)
    return Halves(
        ClosedJaxpr(jaxpr.replace(outvars=[*early, *crossing], eqns=first), closed.consts),
        ClosedJaxpr(
            jaxpr.replace(invars=[*jaxpr.invars, *crossing], outvars=late, eqns=second), closed.consts
        ),
        crossing,
    )


class _Plan:
    """Which equations the first half needs, and which values cross over.

    Attributes:
        equations: of the whole program, loops that give both kinds of outputs split in two.
        alias: variables that are only another name of one (what a split loop passes through).
        roots: these and the outputs of barriers, which only order the work of the first half.
    """

    def __init__(self, closed: ClosedJaxpr, wanted: Sequence[bool], sources: Sequence[Source]) -> None:
        jaxpr = closed.jaxpr
        self.sources: dict[Any, Source] = dict(zip(jaxpr.invars, sources, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            self.sources[var] = Source(Where.BOTH, 0, value is LOSS_COTANGENT)
        self.outputs = [atom for atom, chosen in zip(jaxpr.outvars, wanted, strict=True) if not chosen]
        self.alias: dict[Var, Any] = {}
        self.following = _following(jaxpr.eqns, [v for v, s in self.sources.items() if s.cotangent])
        self.free = _free(jaxpr.eqns, [v for v, s in self.sources.items() if not s.held])
        self.needed = {v for v, chosen in zip(jaxpr.outvars, wanted, strict=True) if chosen and _is_var(v)}
        self.equations = self._deal(jaxpr.eqns)
        self.roots = dict(self.alias)
        for equation in self.equations:
            if equation.primitive.name == BARRIER:
                self.roots.update(zip(equation.outvars, equation.invars, strict=True))
        self.producers = {v: e for e in self.equations for v in e.outvars}

    def root(self, atom: Any) -> Any:
        """The value itself, of which the variable is another name."""
        return _follow(self.roots, atom)

    def _deal(self, equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """Find from the end what the first half needs; split the loops that have a part in both."""
        dealt: list[JaxprEqn] = []
        for equation in reversed(equations):
            use = [var in self.needed for var in equation.outvars]
            if equation.primitive.name == BARRIER:
                self.needed.update(v for v, used in zip(equation.invars, use, strict=True) if used)
                parts = [equation]
            elif equation.primitive.name == "scan" and any(use) and not all(use):
                parts, alias = split_scan(equation, use, [self._source(v) for v in equation.invars], halve)
                self.alias.update(alias)
                self.needed.update(filter(_is_var, parts[0].invars))
                self.needed.update(parts[0].outvars)
            else:
                parts = [equation]
                if any(use) or equation.effects:
                    self.needed.update(filter(_is_var, equation.invars))
                    self.needed.update(equation.outvars)
            dealt += reversed(parts)
        return dealt[::-1]

    def _source(self, atom: Any) -> Source:
        """A loop's operand as an input of its body."""
        if not _is_var(atom):
            return Source(Where.BOTH, 0, False)
        if atom in self.sources:
            return self.sources[atom]
        where = Where.BOTH if atom in self.needed else Where.SECOND
        return Source(where, 0 if atom in self.free else nbytes(atom), atom in self.following)

    def crossing(self) -> list[Var]:
        """The values that the first half computes and the second reads, by a minimum cut.

        Node ("has", v) is on the sink's side if the second half computes v or gets it, ("makes", v) if it
        computes it, and an equation if the second half does it.
        """
        network, seen = Network(), set()
        pending = [v for v in map(self.root, self.outputs) if _is_var(v)]
        for var in pending:
            network.edge(("has", var), SINK)
        while pending:
            var = pending.pop()
            if var in seen:
                continue
            seen.add(var)
            pending += self._place(network, var)
        second = network.sink_side()
        cut = [v for v in seen if ("has", v) in second and ("makes", v) not in second]
        given = {v for v, source in self.sources.items() if source.where is not Where.FIRST}
        order = {v: i for i, v in enumerate([*self.sources, *self.producers])}
        return sorted((v for v in cut if v not in given), key=order.__getitem__)

    def _place(self, network: Network, var: Var) -> Sequence[Var]:
        """Add a value and what makes it; the values to add next."""
        made, source = ("makes", var), self.sources.get(var)
        network.edge(made, ("has", var), _CHARGE * (source.held if source else nbytes(var)))
        if source:
            if source.where is not Where.SECOND:
                network.edge(SOURCE, made)
            return []
        equation = self.producers[var]
        task = ("does", id(equation))
        network.edge(task, made)
        read = [v for v in map(self.root, equation.invars) if _is_var(v)]
        charge = sum(map(nbytes, equation.outvars))
        if var in self.needed:
            if equation.primitive.name not in _REPEATABLE:
                network.edge(SOURCE, task)
                return []
            network.edge(SOURCE, task, charge)
        elif self._stays(equation, read):
            network.edge(task, SINK)
        else:
            network.edge(task, SINK, charge)
            for v in read:
                if v in self.producers and v not in self.needed:  # done in the first half only if that is
                    network.edge(task, ("does", id(self.producers[v])))
        for v in read:
            network.edge(("has", v), task)
        return read

    def _stays(self, equation: JaxprEqn, read: Sequence[Var]) -> bool:
        """Whether an equation that the first half does not need is for the second one in any case."""
        if any(v in self.sources and self.sources[v].where is Where.SECOND for v in read):
            return True
        return equation.primitive.name not in _LIGHT and any(v in self.following for v in read)


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _follow(names: Mapping[Var, Any], atom: Any) -> Any:
    while _is_var(atom) and atom in names:
        atom = names[atom]
    return atom


def _following(equations: Sequence[JaxprEqn], cotangents: Sequence[Var]) -> set[Var]:
    """The values that depend on a cotangent."""
    following = set(cotangents)
    for equation in equations:
        if equation.primitive.name == BARRIER:
            pairs = zip(equation.outvars, equation.invars, strict=True)
            following.update(made for made, read in pairs if _is_var(read) and read in following)
        elif any(_is_var(v) and v in following for v in equation.invars):
            following.update(equation.outvars)
    return following


def _free(equations: Sequence[JaxprEqn], free: Sequence[Var]) -> set[Var]:
    """The values that can be computed cheaply from what costs nothing to hold."""
    known = set(free)
    for equation in equations:
        cheap = equation.primitive.name in _REPEATABLE | {BARRIER}
        if cheap and all(v in known for v in equation.invars if _is_var(v)):
            known.update(equation.outvars)
    return known


def _slice(
    equations: Sequence[JaxprEqn], outputs: Sequence[Any], given: Collection[Var], names: Mapping[Var, Any]
) -> list[JaxprEqn]:
    """The equations that the outputs need beyond `given`, variables replaced by what they are names of."""
    needed, kept = {v for v in outputs if _is_var(v)} - set(given), []
    for equation in reversed(equations):
        use = [var in needed and var not in given for var in equation.outvars]
        if not any(use):
            continue
        read = [_follow(names, atom) for atom in equation.invars]
        made = [v if used else DropVar(v.aval) for v, used in zip(equation.outvars, use, strict=True)]
        if equation.primitive.name == BARRIER:
            read = [atom for atom, used in zip(read, use, strict=True) if used]
            made = [v for v, used in zip(made, use, strict=True) if used]
        kept.append(equation.replace(invars=read, outvars=made))
        needed.update(filter(_is_var, read))
    return kept[::-1]
