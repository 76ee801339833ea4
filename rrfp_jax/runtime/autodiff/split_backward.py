"""A stage's backward in two programs: the gradient that the stage before waits for, then the rest.

    input   I   gradients of the carry, and values on the way there that the second program needs ("crossing")
    weight  W   gradients of the parameters

Both come from the equations of the one traced backward. So the model knows nothing of it, and no product,
reduction or transcendental function is computed twice. How the equations are dealt out:

1. Calls are inlined (`traced.py`): a rematerialised layer is one equation otherwise, all of it in I.
2. What the carry gradients need is in I. A loop that gives both kinds is split into two loops first
   (`split_scan`). Other control flow stays whole, and is in I if I needs any of it.
3. Products, convolutions and the like that follow from a cotangent and that I does not need are in W.
4. What lies between is placed where a microbatch holds the fewest bytes from I to W, by a minimum cut:
   - A value that I has and W needs is held, which costs its bytes. An argument of the stage that W reads is
     held, too. Parameters and prepared values are there anyway.
   - Cheap arithmetic of I may be computed again in W, if that holds less (`REPEATABLE`): XLA fuses it.
     Comparisons are not, nor are the numbers that a comparison in W reads: they would be rounded otherwise.
   - What only W needs and is no product may be done in I already. Examples are the sum over rows behind a
     norm's scale, which replaces two activations by one row, and the forward's products that remat repeats.

   Each such move is charged 1/64 of the bytes it makes, so that ties are computed once, and in W.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

from rrfp_jax.random_keys import is_key
from rrfp_jax.runtime._jax import live_part, scan_counts, scan_like
from rrfp_jax.runtime.autodiff.traced import (
    BARRIER,
    REPEATABLE,
    Program,
    inline,
    is_exact,
    is_repeatable,
    jumps,
    made_of,
    reduce,
)
from rrfp_jax.runtime.sizes import nbytes


def split(
    backward: Program, flowing: int, fixed: int, cotangents: int, arriving: int
) -> tuple[Program, Program]:
    """A stage's backward as I and W.

    I reads a part of the backward's argument list; -> carry gradients, crossing. W reads a part of that list
    followed by I's outputs; -> gradients of the parameters.

    The backward gives `flowing` carry gradients first. Of its argument list the first `fixed` entries are
    there anyway (parameters, prepared). It ends with `arriving` cotangents from `cotangents` on, the last of
    which is the loss scale.
    """
    end = cotangents + arriving
    sources = [
        SplitInput(True, True, 0 if i < fixed or i == end - 1 else nbytes(var.aval), i >= cotangents)
        for i, var in zip(backward.reads, backward.closed.jaxpr.invars, strict=True)
    ]
    wanted = [i < flowing for i in range(len(backward.closed.jaxpr.outvars))]
    first, second, crossing = _halve(backward.closed, wanted, sources)
    sent = first.jaxpr.outvars[:flowing]
    given = [*sent, *(var for var in crossing if var not in sent)]  # what is sent on is not held twice
    places = [*backward.reads, *(end + given.index(var) for var in crossing)]
    own = ClosedJaxpr(first.jaxpr.replace(outvars=given), first.consts)
    return reduce(own).at(backward.reads), reduce(second).at(places)


class SplitInput(NamedTuple):
    """An input of a program to be split: which halves have it (one has a loop's carry), and what it is."""

    first: bool
    second: bool
    held: int  # bytes, if the second half reads it
    from_cotangent: bool


_CONSTANT = SplitInput(True, True, 0, False)

Node: TypeAlias = Hashable

UNCUTTABLE = 1 << 60
"""Capacity of an edge that no cut may go through; far more than all others together."""

SOURCE, SINK = "source", "sink"


class FlowNetwork:
    """Edges with whole-number capacities between nodes of any hashable kind."""

    def __init__(self) -> None:
        self._left: dict[Node, dict[Node, int]] = {SOURCE: {}, SINK: {}}

    def edge(self, tail: Node, head: Node, capacity: int = UNCUTTABLE) -> None:
        """Add an edge; if it is there already, the capacities add up."""
        ahead = self._left.setdefault(tail, {})
        ahead[head] = ahead.get(head, 0) + capacity
        self._left.setdefault(head, {}).setdefault(tail, 0)

    def sink_side(self) -> set[Node]:
        """The nodes beyond the minimum cut that is nearest to the sink; ValueError if none is finite."""
        while SOURCE in (levels := self._levels()):
            if self._push(levels) > UNCUTTABLE // 2:  # finite flows before it have used up a little
                raise ValueError("no finite cut: something must be on both sides")
        return set(levels)

    def _levels(self) -> dict[Node, int]:
        """Distance to the sink over edges with capacity left, of all nodes or as far as the source."""
        levels: dict[Node, int] = {SINK: 0}
        found: list[Node] = [SINK]
        for head in found:  # in which there are more and more
            if SOURCE in levels:
                break
            for tail in self._left[head]:
                if self._left[tail][head] and tail not in levels:
                    levels[tail] = levels[head] + 1
                    found.append(tail)
        return levels

    def _push(self, levels: dict[Node, int]) -> int:
        """Send what fits along shortest paths; the largest flow of one path."""
        ahead = {
            tail: [head for head in self._left[tail] if levels.get(head) == level - 1]
            for tail, level in levels.items()
        }
        path: list[Node] = [SOURCE]
        largest = 0
        while path:
            tail = path[-1]
            if tail == SINK:
                steps = list(pairwise(path))
                flow = min(self._left[a][b] for a, b in steps)
                largest = max(largest, flow)
                for a, b in steps:
                    self._left[a][b] -= flow
                    self._left[b][a] += flow
                path = [SOURCE]
            elif not ahead[tail]:
                path.pop()
                if path:
                    ahead[path[-1]].pop()
            elif self._left[tail][ahead[tail][-1]]:
                path.append(ahead[tail][-1])
            else:
                ahead[tail].pop()
        return largest


_LIGHT = REPEATABLE | {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "cumsum"),
    *("exp", "exp2", "log", "log1p", "log2", "expm1", "tanh", "logistic", "erf", "sin", "cos", "pow", "cbrt"),
    *("sqrt", "rsqrt", "gather", "dynamic_slice", "dynamic_update_slice", "reduce_precision", "polynomial"),
}
"""What the first half may do for the second one's sake: it takes the time of reading its operands."""

_BYTE = 64
"""Price of a byte held, in bytes computed again or early."""
_WRITTEN = 4
"""What it costs more if the first half must write it besides: a saved argument is there already."""


def _halve(
    closed: ClosedJaxpr, wanted: Sequence[bool], sources: Sequence[SplitInput]
) -> tuple[ClosedJaxpr, ClosedJaxpr, Sequence[Var]]:
    """Split a program, given a source for each input, into what its wanted outputs need, and the rest.

    first   the inputs            -> the wanted outputs, crossing
    second  the inputs, crossing  -> the other outputs

    `crossing` are the first program's variables of those values.
    """
    closed = inline(closed)
    plan = _Plan(closed, wanted, sources)
    crossing = plan.crossing()
    jaxpr = closed.jaxpr
    early = [atom for atom, chosen in zip(jaxpr.outvars, wanted, strict=True) if chosen]
    late = [_follow(plan.alias, atom) for atom in plan.outputs]
    given = {*crossing, *jaxpr.invars, *jaxpr.constvars}
    first = jaxpr.replace(outvars=[*early, *crossing], eqns=plan.slice([*early, *crossing]))
    second = jaxpr.replace(invars=[*jaxpr.invars, *crossing], outvars=late, eqns=plan.slice(late, given))
    return ClosedJaxpr(first, closed.consts), ClosedJaxpr(second, closed.consts), crossing


class _Plan:
    """Which equations the first half needs, and which values cross over.

    `needed` are the values that the first half computes for its own outputs; `equations` those of the whole
    program, with loops that give both kinds of outputs split in two; `alias` variables that are only another
    name of one (what a split loop passes through); `roots` these, and the outputs of barriers.
    """

    def __init__(self, closed: ClosedJaxpr, wanted: Sequence[bool], sources: Sequence[SplitInput]) -> None:
        jaxpr = closed.jaxpr
        self.sources: dict[Any, SplitInput] = dict(zip(jaxpr.invars, sources, strict=True))
        self.sources.update(dict.fromkeys(jaxpr.constvars, _CONSTANT))
        self.outputs = [atom for atom, chosen in zip(jaxpr.outvars, wanted, strict=True) if not chosen]
        self.alias: dict[Var, Any] = {}
        self.following = _following(jaxpr.eqns, [v for v, s in self.sources.items() if s.from_cotangent])
        # What can be computed cheaply from what costs nothing to hold.
        cheap = [e for e in jaxpr.eqns if e.primitive.name in REPEATABLE | {BARRIER}]
        self.free = made_of([v for v, s in self.sources.items() if not s.held], cheap)
        self.needed = {v for v, chosen in zip(jaxpr.outvars, wanted, strict=True) if chosen and _is_var(v)}
        self.equations = self._deal(jaxpr.eqns)
        self.once = self._compared()
        barriers = [e for e in self.equations if e.primitive.name == BARRIER]
        self.roots = self.alias | {v: w for e in barriers for v, w in zip(e.outvars, e.invars, strict=True)}
        self.producers = {v: e for e in self.equations for v in e.outvars}

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
                sources = [self._source(atom) for atom in equation.invars]
                loops, alias = _split_scan(equation, use, sources)
                self.alias.update(alias)
                self._need(loops[0])
                if any(source.from_cotangent for source in sources):
                    self.following.update(loops[0].outvars)
                dealt += reversed(loops)
            else:
                if any(use) or equation.effects:
                    self._need(equation)
                dealt.append(equation)
        return dealt[::-1]

    def _compared(self) -> set[Any]:
        """The values that comparisons of the second half read, of which there must be one for both halves."""
        found: set[Any] = set()
        for equation in reversed(self.equations):
            late = jumps(equation) and self.needed.isdisjoint(equation.outvars)
            if late or (is_exact(equation) and not found.isdisjoint(equation.outvars)):
                found.update(_follow(self.alias, v) for v in equation.invars if _is_var(v))
        return found

    def _need(self, equation: JaxprEqn) -> None:
        self.needed.update(filter(_is_var, equation.invars))
        self.needed.update(equation.outvars)

    def _source(self, atom: Any) -> SplitInput:
        """A loop's operand as an input of its body."""
        if not _is_var(atom):
            return _CONSTANT
        if atom in self.sources:
            return self.sources[atom]
        held = 0 if atom in self.free else nbytes(atom.aval)
        return SplitInput(atom in self.needed, True, held, atom in self.following)

    def slice(self, outputs: Sequence[Any], given: Collection[Var] = ()) -> list[JaxprEqn]:
        """The equations that the outputs need beyond what is given."""
        needed = {v for v in outputs if _is_var(v)}.difference(given)
        kept = []
        for equation in reversed(self.equations):
            use = [var in needed for var in equation.outvars]
            if not any(use) and (given or not equation.effects):
                continue
            read = [_follow(self.alias, atom) for atom in equation.invars]
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
        network = FlowNetwork()
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
                if self.sources[var].first:
                    network.edge(SOURCE, ("makes", var))
                continue
            equation = self.producers[var]
            network.edge(("does", id(equation)), ("makes", var))
            if id(equation) not in placed:
                placed.add(id(equation))
                pending += self._place(network, equation, var in self.needed)
        second = network.sink_side()
        cut = [v for v in (*self.sources, *self.producers) if v in placed and ("makes", v) not in second]
        given = {v for v, source in self.sources.items() if source.second}
        return [v for v in cut if ("has", v) in second and v not in given]

    def _price(self, var: Var) -> int:
        """Bytes of having the value in the second half without computing it there; keys do not cross."""
        source = self.sources.get(var)
        if source is not None and source.second:
            return _BYTE * source.held
        if is_key(var.aval):
            return UNCUTTABLE
        return (_BYTE + _WRITTEN) * nbytes(var.aval)

    def _place(self, network: FlowNetwork, equation: JaxprEqn, needed: bool) -> Sequence[Any]:
        """Add an equation; what it reads if the second half may do it."""
        task = ("does", id(equation))
        charge = nbytes([v.aval for v in equation.outvars])
        once = not is_exact(equation) and not self.once.isdisjoint(equation.outvars)
        if needed and (once or not is_repeatable(equation)):
            network.edge(SOURCE, task)
            return []
        read = [v for v in (_follow(self.roots, atom) for atom in equation.invars) if _is_var(v)]
        for v in read:
            network.edge(("has", v), task)
        stays = equation.primitive.name not in _LIGHT and any(v in self.following for v in read)
        if needed:
            network.edge(SOURCE, task, charge)
        elif stays or any(v in self.sources and not self.sources[v].first for v in read):
            network.edge(task, SINK)
        else:
            network.edge(task, SINK, charge)
            for v in read:
                if v in self.producers and v not in self.needed:  # if this is done early, so is that, once
                    network.edge(task, ("does", id(self.producers[v])))
        return read


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


Pairs: TypeAlias = Sequence[tuple[Var, Any]]
"""Inputs of a loop's body with the operands that they stand for."""


def _split_scan(
    equation: JaxprEqn, wanted: Sequence[bool], sources: Sequence[SplitInput]
) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """The loop as one or two equations, and its outputs that are other names of what the first one stacks.

    `wanted` says for each output whether the first half needs it, `sources` where each operand is at hand.
    """
    n, m = scan_counts(equation)
    early = _early(equation.params["jaxpr"], n, m, wanted)
    first, second, crossing = _halve(equation.params["jaxpr"], early, _in_body(equation, early, sources))
    pairs = list(zip(first.jaxpr.invars, equation.invars, strict=True))
    constants, carried, scanned = pairs[:n], pairs[n : n + m], pairs[n + m :]
    made = first.jaxpr.outvars
    theirs = [i for i, flag in enumerate(early) if flag]
    stacks: dict[Any, Var] = {  # also wanted, so stacked in any case
        made[k]: equation.outvars[i] for k, i in enumerate(theirs) if i >= m and isinstance(made[k], Var)
    }
    new = [var for var in crossing if var not in stacks]
    for var in new:
        one: Any = var.aval
        stacks[var] = Var(one.update(shape=(equation.params["length"], *one.shape), weak_type=False))
    body = ClosedJaxpr(first.jaxpr.replace(outvars=[*made[: len(theirs)], *new]), first.consts)
    outputs = [*(equation.outvars[i] for i in theirs), *(stacks[var] for var in new)]
    kept = [pair for pair, flag in zip(carried, early, strict=False) if flag]
    loops = [_loop(equation, body, (constants, kept, scanned), outputs)]

    rest = [i for i, flag in enumerate(early) if not flag]
    own = [(i, equation.outvars[i], a) for i, a in zip(rest, second.jaxpr.outvars, strict=True)]
    names = {v: stacks[a] for i, v, a in own if i >= m and isinstance(a, Var) and a in stacks}
    own = [pair for pair in own if pair[1] not in names]
    if own:
        body = ClosedJaxpr(second.jaxpr.replace(outvars=[atom for _, _, atom in own]), second.consts)
        kept = [pair for pair, flag in zip(carried, early, strict=False) if not flag]
        crossed = [(var, stacks[var]) for var in crossing]
        outputs = [outer for _, outer, _ in own]
        loops.append(_loop(equation, body, (constants, kept, [*scanned, *crossed]), outputs))
    return loops, names


def _early(body: ClosedJaxpr, n: int, m: int, wanted: Sequence[bool]) -> list[bool]:
    """Which outputs of the body are the first loop's: `wanted`, and the carries that those need."""
    early = list(wanted)
    while more := {i - n for i in live_part(body, early)[1] if n <= i < n + m and not early[i - n]}:
        early = [flag or i in more for i, flag in enumerate(early)]
    return early


def _in_body(equation: JaxprEqn, early: Sequence[bool], sources: Sequence[SplitInput]) -> list[SplitInput]:
    """The operands as inputs of the body; bytes are those of one iteration."""
    body, length = equation.params["jaxpr"], equation.params["length"]
    n, m = scan_counts(equation)
    reads = set(live_part(body, early)[1])
    following = any(source.from_cotangent for source in sources)
    inside = []
    for i, (source, var) in enumerate(zip(sources, body.jaxpr.invars, strict=True)):
        if n <= i < n + m:
            inside.append(SplitInput(early[i - n], not early[i - n], nbytes(var.aval), following))
        else:
            held = source.held // max(length, 1)
            inside.append(SplitInput(source.first or i in reads, True, held, source.from_cotangent))
    return inside


def _loop(
    equation: JaxprEqn, body: ClosedJaxpr, parts: tuple[Pairs, Pairs, Pairs], outputs: Sequence[Var]
) -> JaxprEqn:
    """A scan without the constants and scanned operands that its body does not read."""
    flat = body.jaxpr.replace(invars=[inner for part in parts for inner, _ in part])
    every, reads = live_part(ClosedJaxpr(flat, body.consts), [True] * len(outputs))
    needed = {*(flat.invars[i] for i in reads), *(inner for inner, _ in parts[1])}  # carries stay
    kept = [[pair for pair in part if pair[0] in needed] for part in parts]
    closed = every.jaxpr.replace(invars=[inner for part in kept for inner, _ in part])
    operands = [[outer for _, outer in part] for part in kept]
    return scan_like(equation, ClosedJaxpr(closed, body.consts), operands, outputs)
