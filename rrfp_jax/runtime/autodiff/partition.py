"""Deals out the equations of a program to two halves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

from rrfp_jax.random_keys import is_key
from rrfp_jax.runtime.autodiff.halves import Halves, Source, Where
from rrfp_jax.runtime.autodiff.inline import BARRIER, inline
from rrfp_jax.runtime.autodiff.mincut import SINK, SOURCE, UNCUTTABLE, Network
from rrfp_jax.runtime.autodiff.split_scan import split_scan
from rrfp_jax.runtime.autodiff.traced import REPEATABLE, is_repeatable
from rrfp_jax.runtime.sizes import nbytes

_LIGHT = REPEATABLE | {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "cumsum"),
    *("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "sin", "cos", "pow", "cbrt"),
    *("sqrt", "rsqrt", "gather", "dynamic_slice", "dynamic_update_slice", "reduce_precision"),
}
"""What the first half may do for the second one's sake: it takes the time of reading its operands."""

_BYTE = 64
"""Price of a byte held, in bytes computed again or early."""
_WRITTEN = 4
"""What it costs more if the first half must write it besides: a saved argument is there already."""


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
    late = [plan.resolve(atom) for atom, chosen in zip(jaxpr.outvars, wanted, strict=True) if not chosen]
    given = {*crossing, *jaxpr.invars, *jaxpr.constvars}
    first = jaxpr.replace(outvars=[*early, *crossing], eqns=plan.slice([*early, *crossing]))
    second = jaxpr.replace(invars=[*jaxpr.invars, *crossing], outvars=late, eqns=plan.slice(late, given))
    return Halves(ClosedJaxpr(first, closed.consts), ClosedJaxpr(second, closed.consts), crossing)


class _Plan:
    """Which equations the first half needs, and which values cross over.

    Attributes:
        sources: of inputs and constants.
        needed: the values that the first half computes for its own outputs.
        equations: of the whole program, loops that give both kinds of outputs split in two.
        alias: variables that are only another name of one (what a split loop passes through).
        roots: these, and the outputs of barriers, which only order work.
    """

    def __init__(self, closed: ClosedJaxpr, wanted: Sequence[bool], sources: Sequence[Source]) -> None:
        jaxpr = closed.jaxpr
        self.sources: dict[Any, Source] = dict(zip(jaxpr.invars, sources, strict=True))
        self.sources.update((var, Source(Where.BOTH, 0, False)) for var in jaxpr.constvars)
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

    def resolve(self, atom: Any) -> Any:
        """What the variable is another name of."""
        return _follow(self.alias, atom)

    def _deal(self, equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """Find from the end what the first half needs; split the loops that have a part in both."""
        dealt: list[JaxprEqn] = []
        for equation in reversed(equations):
            use = [var in self.needed for var in equation.outvars]
            if equation.primitive.name == BARRIER:
                pairs = zip(equation.invars, use, strict=True)
                self.needed.update(v for v, used in pairs if used and _is_var(v))
                dealt.append(equation)
            elif equation.primitive.name == "scan" and any(use) and not all(use):
                dealt += reversed(self._deal_loop(equation, use))
            else:
                if any(use) or equation.effects:
                    self._need(equation)
                dealt.append(equation)
        return dealt[::-1]

    def _need(self, equation: JaxprEqn) -> None:
        self.needed.update(filter(_is_var, equation.invars))
        self.needed.update(equation.outvars)

    def _deal_loop(self, equation: JaxprEqn, use: Sequence[bool]) -> list[JaxprEqn]:
        sources = [self._source(atom) for atom in equation.invars]
        loops, alias = split_scan(equation, use, sources, halve)
        self.alias.update(alias)
        self._need(loops[0])
        if any(source.cotangent for source in sources):
            self.following.update(loops[0].outvars)
        return loops

    def _source(self, atom: Any) -> Source:
        """A loop's operand as an input of its body."""
        if not _is_var(atom):
            return Source(Where.BOTH, 0, False)
        if atom in self.sources:
            return self.sources[atom]
        where = Where.BOTH if atom in self.needed else Where.SECOND
        return Source(where, 0 if atom in self.free else nbytes(atom.aval), atom in self.following)

    def slice(self, outputs: Sequence[Any], given: Collection[Var] = ()) -> list[JaxprEqn]:
        """The equations that the outputs need beyond what is given."""
        needed = {v for v in outputs if _is_var(v)}.difference(given)
        kept = []
        for equation in reversed(self.equations):
            use = [var in needed for var in equation.outvars]
            if not any(use) and (given or not equation.effects):
                continue
            read = [self.resolve(atom) for atom in equation.invars]
            made = [v if used else DropVar(v.aval) for v, used in zip(equation.outvars, use, strict=True)]
            if equation.primitive.name == BARRIER:
                read = [atom for atom, used in zip(read, use, strict=True) if used]
                made = [v for v, used in zip(made, use, strict=True) if used]
            kept.append(equation.replace(invars=read, outvars=made))
            needed.update(v for v in read if _is_var(v) and v not in given)
        return kept[::-1]

    def crossing(self) -> list[Var]:
        """The values that the first half computes and the second reads, by a minimum cut.

        Node ("has", v) is on the sink's side if the second half has v, ("makes", v) if it computes v itself,
        and ("does", e) if it does equation e.
        """
        network = Network()
        pending: list[Any] = [_follow(self.roots, atom) for atom in self.outputs]
        for var in filter(_is_var, pending):
            network.edge(("has", var), SINK)
        placed: set[Any] = set()
        while pending:
            var = pending.pop()
            if not _is_var(var) or var in placed:
                continue
            placed.add(var)
            network.edge(("makes", var), ("has", var), self._price(var))
            if var in self.sources:
                if self.sources[var].where is not Where.SECOND:
                    network.edge(SOURCE, ("makes", var))
                continue
            equation = self.producers[var]
            network.edge(("does", id(equation)), ("makes", var))
            if id(equation) not in placed:
                placed.add(id(equation))
                pending += self._place(network, equation, var in self.needed)
        second = network.sink_side()
        cut = [v for v in (*self.sources, *self.producers) if v in placed and ("makes", v) not in second]
        given = {v for v, source in self.sources.items() if source.where is not Where.FIRST}
        return [v for v in cut if ("has", v) in second and v not in given]

    def _price(self, var: Var) -> int:
        """Of having the value in the second half without computing it there; keys do not cross."""
        source = self.sources.get(var)
        if source is not None and source.where is not Where.FIRST:
            return _BYTE * source.held
        if is_key(var.aval):
            return UNCUTTABLE
        return (_BYTE + _WRITTEN) * nbytes(var.aval)

    def _place(self, network: Network, equation: JaxprEqn, needed: bool) -> Sequence[Any]:
        """Add an equation; what it reads if the second half may do it."""
        task = ("does", id(equation))
        charge = nbytes([v.aval for v in equation.outvars])
        if needed and not is_repeatable(equation):
            network.edge(SOURCE, task)
            return []
        read = [v for v in (_follow(self.roots, atom) for atom in equation.invars) if _is_var(v)]
        for v in read:
            network.edge(("has", v), task)
        if needed:
            network.edge(SOURCE, task, charge)
        elif self._stays(equation, read):
            network.edge(task, SINK)
        else:
            network.edge(task, SINK, charge)
            for v in read:
                if v in self.producers and v not in self.needed:  # if this is done early, so is that, once
                    network.edge(task, ("does", id(self.producers[v])))
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
    known, cheap = set(free), REPEATABLE | {BARRIER}
    for equation in equations:
        if equation.primitive.name in cheap and all(v in known for v in equation.invars if _is_var(v)):
            known.update(equation.outvars)
    return known
