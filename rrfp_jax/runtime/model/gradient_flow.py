"""Which leaves of the carries have a gradient, through all layers of a model, as plain JAX would have it.

From the loss back to the first layer, each layer says which of its inputs a cotangent reaches, and from which
of its outputs. A leaf between two layers has a gradient if the objective's cotangent reaches it, and if it
follows from a trained parameter. All other leaves are sent without one. A loss's weight is what the objective
is divided by, and is not differentiated: its cotangent, followed in the same way, must reach no parameter.

Layers that would not train although the loss is computed from them are refused, with the place where their
gradient ends: integers, rounding, a `stop_gradient` further on, or a layer that does not use what it gets.
Where that is so of some parameters of a layer only, such as a router's behind `argmax`, there is a warning. A
parameter that the loss does not follow from is left alone, such as that of a head for evaluation; so is one
that its own layer puts behind `stop_gradient`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, groupby
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params

from rrfp_jax.errors import UsageError, text_of
from rrfp_jax.fields import numbered
from rrfp_jax.runtime._jax import line_of, live_part
from rrfp_jax.runtime.autodiff.traced import (
    CALLS,
    dependence,
    inline,
    is_inexact,
    output_dependence,
    spec_of,
    with_inner,
)
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline, Specs
from rrfp_jax.runtime.model.roles import Roles, covering, leaf_paths
from rrfp_jax.runtime.model.user_errors import reason_of

Border: TypeAlias = tuple[int, ...]
"""Indices of the leaves of a carry that have a gradient."""

_Flags: TypeAlias = Sequence[Sequence[int]]
"""By step, of each of its values."""

_OBJECTIVE, _WEIGHT = 1, 2
"""Flags of values that these two cotangents reach."""

_MOST_NAMES = _MOST_PLACES = 3

_STILL = frozenset(["stop_gradient", "round", "floor", "ceil", "sign", "nextafter"])
"""Primitives whose derivative is zero everywhere. JAX gives their results no tangent at all."""

_CALLS = CALLS.keys() - {"custom_jvp_call", "custom_vjp_call"}
"""Primitives that only call a program. Functions with a derivative of their own are not among them."""

_DIFFERENTIABLE = {
    "_loop": "For a loop, take jax.lax.scan or a fori_loop of fixed length",
    "callback": "Give the callback a derivative (jax.custom_jvp)",
}
"""By a word in JAX's error, what has a derivative in place of what has none."""

_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "is_finite"])


@dataclass(frozen=True)
class Flow:
    """How the gradient goes through a model, for microbatches of a bucket."""

    borders: Sequence[Border]  # of the carry that each layer gets; last ()
    reached: frozenset[str]  # names of trained parameters with a gradient, of tied ones all names
    lost: Mapping[str, str]  # by trained parameter without any although the loss follows from it, why
    trained: Sequence[Sequence[str]]  # by layer, names of all trained parameters


@dataclass(frozen=True)
class _Step:
    """A layer, or last the loss: parameters, carry, the rest -> carry, then total and weight if it `sums`."""

    name: str
    closed: ClosedJaxpr
    paths: Sequence[str]  # of the parameters
    trained: frozenset[int]  # indices of those that are trained
    arriving: int  # number of leaves of the carry that it gets
    leaves: Sequence[str]  # names of those that it gives
    sums: bool

    def inputs(self, params: Iterable[int], carry: Iterable[int]) -> list[bool]:
        """Flags of its inputs: of these parameters, and these leaves of the carry."""
        chosen = {*params, *(len(self.paths) + i for i in carry)}
        return [i in chosen for i in range(len(self.closed.jaxpr.invars))]


def gradient_flow(pipe: Pipeline, shapes: Sequence[LayerShapes], fields: Specs, roles: Roles) -> Flow:
    """Follow the objective's cotangent from the loss back to all parameters; refuses one that cannot be."""
    steps = _steps(pipe, shapes, fields, roles)
    known: dict[Any, Mapping[int, frozenset[int]]] = {}  # repeats of a layer are alike
    sources: list[Mapping[int, frozenset[int]]] = []
    reaching: list[list[int]] = [[]]  # the flags of the carry that each step gets, and of what the last gives
    origin, reached = "", set[str]()  # names of owners
    for step, moves in zip(steps[::-1], _moving(steps)[::-1], strict=True):
        flags = [*reaching[0], *[_OBJECTIVE, _WEIGHT][: 2 * step.sums]]
        outputs = step.closed.jaxpr.outvars
        flags = [flag * is_inexact(var) for flag, var in zip(flags, outputs, strict=True)]
        kind = id(step.closed), tuple(moves), tuple(map(bool, flags))
        if kind not in known:
            known[kind] = _sources(step, moves, flags)
        of = known[kind]
        sources.insert(0, of)
        if step.sums and any(len(step.leaves) + 1 in reached_by for reached_by in of.values()):
            origin = step.name
        first = len(step.paths)
        inputs = [reduce(or_, (flags[k] for k in of.get(i, ())), 0) for i in range(first + step.arriving)]
        for path, flag in zip(step.paths, inputs[:first], strict=True):
            if flag & _WEIGHT:
                raise UsageError(
                    f"{origin}: Loss.weight depends on the parameter {path}, but weights are not "
                    f"differentiated: the gradient would lack a part. Give weight=jax.lax.stop_gradient(...) "
                    f"if that part is not wanted; else count in weight what does not depend on parameters "
                    f"(tokens, rows), and put what does into the total"
                )
            if flag & _OBJECTIVE:
                reached.add(roles.owners.get(path, path))
        reaching.insert(0, inputs[first:])
    paths = [path for step in steps for path in step.paths]
    names = frozenset(path for path in paths if roles.owners.get(path, path) in reached)
    trained = [[step.paths[i] for i in sorted(step.trained)] for step in steps[:-1]]
    without = list[tuple[int, list[int]]]()  # layers, with places of parameters that one reason is given for
    for k, own in enumerate(trained):
        places = [i for i in sorted(steps[k].trained) if steps[k].paths[i] not in names]
        groups = [places] if len(places) == len(own) else [[i] for i in places]
        without += [(k, group) for group in groups if group]
    reasons = zip(without, _reasons(steps, reaching, without), strict=True)
    lost = {steps[k].paths[i]: why for (k, places), why in reasons if why for i in places}
    return Flow(_borders(steps, sources, reaching), names, lost, trained)


def _steps(pipe: Pipeline, shapes: Sequence[LayerShapes], fields: Specs, roles: Roles) -> list[_Step]:
    steps = []
    for index, own in enumerate(shapes):
        params = {str(index): own.params}
        trained = frozenset(roles.leaves(params).trained)
        leaves = leaf_paths({"": own.carry_out})
        sums = len(own.traced.jaxpr.outvars) > len(leaves)
        arriving, paths = len(jax.tree.leaves(own.carry_in)), leaf_paths(params)
        steps.append(_Step(pipe.who(index), own.traced, paths, trained, arriving, leaves, sums))
    carry = shapes[-1].carry_out
    loss, arriving = pipe.traced_loss(carry, fields), len(jax.tree.leaves(carry))
    return [*steps, _Step("the loss", loss, [], frozenset(), arriving, [], True)]


def _moving(steps: Sequence[_Step]) -> list[list[bool]]:
    """For each step, which of its inputs may have a tangent: they follow from a parameter that is trained."""
    found, arriving = [], list[bool]()
    for step in steps:
        found.append(step.inputs(step.trained, (i for i, moves in enumerate(arriving) if moves)))
        arriving = _tangents(step.closed.jaxpr, found[-1])[0][: len(step.leaves)]
    return found


def _sources(step: _Step, moves: Sequence[bool], flags: Sequence[int]) -> Mapping[int, frozenset[int]]:
    """For each input that may have a tangent, the outputs whose cotangents reach it, by JAX's own vjp."""
    inputs = [i for i, may in enumerate(moves) if may]
    outputs = [k for k, flag in enumerate(flags) if flag]
    if not inputs or not outputs:
        return {}
    jaxpr = step.closed.jaxpr
    try:
        traced = _pulled_back(step.closed, inputs, outputs)
    except Exception as error:
        ways = [way for word, way in _DIFFERENTIABLE.items() if word in text_of(error)]
        remedy = f". {ways[0]}; where no gradient is wanted, jax.lax.stop_gradient before it" if ways else ""
        raise UsageError(f"{step.name} cannot be differentiated: {reason_of(error)}{remedy}") from error
    masks = [mask >> len(jaxpr.invars) for mask in output_dependence(traced)]
    found = {
        i: frozenset(k for bit, k in enumerate(outputs) if mask >> bit & 1)
        for i, mask in zip(inputs, masks, strict=True)
    }
    added = [inputs[at] for at in _added(traced, len(jaxpr.invars))]
    if added and any(map(_adds, chain.from_iterable(map(with_inner, jaxpr.eqns)))):
        for i in added:  # JAX calls such a rule if what it is of has a cotangent
            moved, _ = _tangents(jaxpr, [j == i for j in range(len(moves))])
            found[i] = frozenset(k for k in outputs if moved[k])
    return found


def _pulled_back(closed: ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]) -> ClosedJaxpr:
    """(all inputs, cotangents of some outputs) -> gradients of some inputs."""
    jaxpr, function = closed.jaxpr, jaxpr_as_fun(closed)

    def pulled_back(values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def chosen(*own: Any) -> list[Any]:
            filled = {**dict(enumerate(values)), **dict(zip(inputs, own, strict=True))}
            found = function(*(filled[i] for i in range(len(values))))
            return [found[k] for k in outputs]

        return jax.vjp(chosen, *(values[i] for i in inputs))[1](list(cotangents))

    cotangents = [spec_of(jaxpr.outvars[k]) for k in outputs]
    return jax.make_jaxpr(pulled_back)([*map(spec_of, jaxpr.invars)], cotangents)


def _added(traced: ClosedJaxpr, values: int) -> list[int]:
    """Which gradients follow from no cotangent, those after the `values`, and are no plain 0."""
    flat = inline(traced).jaxpr
    spread = {e.outvars[0]: e.invars[0] for e in flat.eqns if e.primitive.name == "broadcast_in_dim"}
    atoms = [v if isinstance(v, Literal) else spread.get(v, v) for v in flat.outvars]
    alone = [not mask >> values for mask in output_dependence(traced)]
    return [i for i, v in enumerate(atoms) if alone[i] and not (isinstance(v, Literal) and v.val == 0)]


def _adds(equation: JaxprEqn) -> bool:
    """Whether it has a rule of its own that adds to the gradient, as is done for an auxiliary loss."""
    if equation.primitive.name != "custom_vjp_call":
        return False
    read = [*dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal))]
    moving, made = ([i for i, v in enumerate(some) if is_inexact(v)] for some in (read, equation.outvars))
    program = equation.params["call_jaxpr"].jaxpr.replace(
        constvars=[], invars=read, outvars=equation.outvars, eqns=[equation]
    )
    return bool(_added(_pulled_back(ClosedJaxpr(program, []), moving, made), len(read)))


def _borders(
    steps: Sequence[_Step], sources: Sequence[Mapping[int, frozenset[int]]], reaching: _Flags
) -> list[Border]:
    """The leaves that the objective reaches and that truly follow from a trained parameter."""
    borders, arriving = [], set[int]()
    for step, of, flags in zip(steps[:-1], sources, reaching, strict=False):
        borders.append(tuple(sorted(i for i in arriving if flags[i] & _OBJECTIVE)))
        first = len(step.paths)
        follows = [outputs for i, outputs in of.items() if i < first or i - first in arriving]
        arriving = {k for outputs in follows for k in outputs if k < len(step.leaves)}
    return [*borders, ()]


class _End(NamedTuple):
    """An equation that ends the tangents of what it reads, its line, and the outermost one that it is in."""

    equation: JaxprEqn
    line: str
    outer: JaxprEqn


def _tangents(jaxpr: Any, moving: Sequence[bool]) -> tuple[list[bool], list[_End]]:
    """Which outputs can have a tangent if these inputs have (at times more than do), and where others end."""
    ends: list[_End] = []
    known = {v for v, moves in zip(jaxpr.invars, moving, strict=True) if moves and is_inexact(v)}
    for equation in jaxpr.eqns:
        read = [not isinstance(atom, Literal) and atom in known for atom in equation.invars]
        if not any(read):
            continue
        name, bodies = equation.primitive.name, list(jaxprs_in_params(equation.params))
        flags = [name not in _STILL] * len(equation.outvars)
        if name in _CALLS and len(bodies) == 1:
            flags, inner = _tangents(bodies[0], read)
            ends += [_End(end.equation, end.line or line_of(equation), equation) for end in inner]
        moved = [v for v, flag in zip(equation.outvars, flags, strict=True) if flag and is_inexact(v)]
        known.update(moved)
        if equation.outvars and not moved and name not in _CALLS:
            ends.append(_End(equation, line_of(equation), equation))
    return [not isinstance(atom, Literal) and atom in known for atom in jaxpr.outvars], ends


def _reasons(steps: list[_Step], reaching: _Flags, without: Sequence[tuple[int, list[int]]]) -> list[str]:
    """Why these parameters of layers would not train; empty if the loss does not follow from them."""
    if not without:
        return []
    distinct = {id(step.closed): step.closed for step in steps}  # repeats of a layer are alike
    known = {number: output_dependence(closed) for number, closed in distinct.items()}
    follows = [known[id(step.closed)] for step in steps]
    # For each step, the leaves it gets from which any total follows; last those it gives.
    needed = [set[int]()]
    for step, masks in zip(steps[::-1], follows[::-1], strict=True):
        used = [mask for k, mask in enumerate(masks) if k in needed[0] or k == len(step.leaves)]
        union = reduce(or_, used, 0) >> len(step.paths)
        needed.insert(0, {i for i in range(step.arriving) if union >> i & 1})
    return [_place(*own, steps, follows, needed, reaching) for own in without]


def _place(
    layer: int, own: list[int], steps: list[_Step], follows: _Flags, needed: list[set[int]], reaching: _Flags
) -> str:
    """Where the gradient of parameters of a layer ends; empty if the loss does not follow from them."""
    params: Iterable[int] = own
    moving, following = set[int](), set[int]()
    for k, step in enumerate(steps[layer:], layer):
        total = len(step.leaves)
        mask = sum(flag << i for i, flag in enumerate(step.inputs(params, following)))
        if k == layer and not any(made & mask for made in follows[k]):
            return ""
        used = [j for j, own in enumerate(follows[k]) if own & mask and (j in needed[k + 1] or j == total)]
        if not used:  # the loss may need what a later step makes without its carry
            deaf = [n for n in range(k + 1, len(steps)) if not needed[n] and (needed[n + 1] or steps[n].sums)]
            return f"{steps[deaf[0]].name} does not use what {steps[deaf[0] - 1].name} gives" if deaf else ""
        moves, _ = _tangents(step.closed.jaxpr, step.inputs(params, moving))
        if not any(moves[j] for j in used):
            return _end(step, used, step.inputs(params, moving), own=k == layer)
        if any(moves[j] and (j == total or reaching[k + 1][j] & _OBJECTIVE) for j in used):
            return f"it ends in {step.name}, whose derivative is zero"
        params, following = (), {j for j in used if j < total}
        moving = {j for j in following if moves[j]}
    return ""


def _end(step: _Step, outputs: Sequence[int], moving: Sequence[bool], own: bool) -> str:
    """What in a step leaves these outputs without a tangent; empty if a layer stops its own parameters'."""

    def rank(end: _End) -> int:
        """How likely users have to look at another equation; comparisons are mostly masks."""
        name = end.equation.primitive.name
        return 0 if name in _STILL else 1 if name == "convert_element_type" else 2 + (name in _COMPARISONS)

    live, reads = live_part(step.closed, [j in outputs for j in range(len(step.closed.jaxpr.outvars))])
    ends = _tangents(live.jaxpr, [moving[i] for i in reads])[1]
    at = line = ""
    if ends:
        equation, where, outer = min(ends, key=rank)
        name = equation.primitive.name
        made: Any = equation.outvars[0]
        if own and name == "stop_gradient":
            masks = dependence(step.closed)
            if not any(masks[v] >> len(step.paths) for v in outer.invars if not isinstance(v, Literal)):
                return ""
        line = f" ({where})" if where else ""
        if name == "convert_element_type":
            name = f"a cast to {made.aval.dtype}"
        elif not is_inexact(made):
            name = f"{name}, which gives {made.aval.dtype}"
        at = f", at {name}{line}"
    for j in outputs:
        leaf: Any = step.closed.jaxpr.outvars[j]
        if not is_inexact(leaf):
            named = f"its carry leaf {step.leaves[j]}" if step.leaves[j] else "its carry"
            return f"{step.name} gives {named} as {leaf.aval.dtype}{line}"
    return f"it ends in {step.name}{at}"


def refuse_untrained(flows: Sequence[Flow]) -> None:
    """Refuse layers of which some bucket's gradient ends on its way, and no bucket's gets there."""
    trained, lost = flows[0].trained, lost_gradients(flows)
    silent = {k: lost[own[0]] for k, own in enumerate(trained) if own and lost.keys() >= {*own}}
    if not silent:
        return
    said = []
    for place, group in groupby(silent, silent.__getitem__):
        layers = list(group)
        names = [name for k in layers for name in trained[k]]
        said.append(
            f"{numbered('layer', layers)} would not train, for no gradient reaches {_names(names)}: {place}"
        )
    remedy = "Let the loss follow from them through floating point numbers, by functions with a derivative"
    if others := [name for k, names in enumerate(trained) if k not in silent for name in names]:
        kept = covering([name for k in silent for name in trained[k]], others)
        remedy += f"; if they shall keep their values: Pipeline(..., frozen={kept})"
    raise UsageError(f"{'; '.join(said)}. {remedy}")


def lost_gradients(flows: Sequence[Flow]) -> dict[str, str]:
    """By trained parameter that no bucket's gradient gets to although the loss follows from it, why."""
    somewhere = frozenset[str]().union(*(flow.reached for flow in flows))
    found = {name: why for flow in reversed(flows) for name, why in flow.lost.items()}
    return {name: found[name] for own in flows[0].trained for name in own if name in found.keys() - somewhere}


def told_lost(lost: Mapping[str, str]) -> str:
    """What `lost_gradients` found, as one sentence."""
    groups = groupby(lost, lost.__getitem__)
    said = [f"no gradient reaches {_names([*group])}: {place}" for place, group in groups]
    more = len(said) - _MOST_PLACES
    return "; ".join(said[:_MOST_PLACES]) + (f"; and so in {more} more places" if more > 0 else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
