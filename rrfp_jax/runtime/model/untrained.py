"""Layers that would not train though the loss is computed from them, and the place where their gradient ends.

A parameter that the loss does not follow from is left alone, such as that of a head for evaluation; so is one
that its own layer puts behind `stop_gradient`. Refused are layers from which the loss follows only through
integers, rounding, or a `stop_gradient` further on, and layers that give what a later one does not use.

Which leaves of the carries have a gradient, through all layers of a model, as plain JAX would have it.

From the loss back to the first layer, each layer tells which of its inputs a cotangent reaches, and from
which of its outputs. A leaf between two layers has a gradient if the objective's cotangent reaches it, and if
it follows from a parameter that is trained. All others are sent without one.

A loss's weight is what the objective is divided by, and is not differentiated. So its cotangent is followed
in the same way, and must not reach any parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Literal

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import live_part
from rrfp_jax.runtime.autodiff.differentiate import end_of_motion, is_differentiable, may_move, reached
from rrfp_jax.runtime.autodiff.traced import dependence, output_dependence
from rrfp_jax.runtime.model.calls import reason_of
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline, Specs
from rrfp_jax.runtime.model.roles import Roles, leaf_paths

Border: TypeAlias = tuple[int, ...]
"""Indices of the leaves of a carry that have a gradient."""

_OBJECTIVE, _WEIGHT = 1, 2
"""Flags of values that these two cotangents reach."""


@dataclass(frozen=True)
class Flow:
    """How the gradient goes through a model, for microbatches of a bucket.

    Attributes:
        borders: for each layer, which leaves of the carry that it gets have a gradient; last ().
        reached: names of the trained parameters that have one; of tied ones, the owner's and all aliases'.
        cuts: by layer without any, why; see `untrained.py`.
    """

    borders: Sequence[Border]
    reached: frozenset[str]
    cuts: Mapping[int, str]


def gradient_flow(pipe: Pipeline, shapes: Sequence[LayerShapes], fields: Specs, roles: Roles) -> Flow:
    """Follow the objective's cotangent from the loss back to all parameters.

    Raises:
        UsageError: a layer that must be differentiated cannot be, or a loss's weight depends on a parameter.
    """
    steps = _steps(pipe, shapes, fields, roles)
    moving = _moving(steps)
    known: dict[Any, Mapping[int, frozenset[int]]] = {}  # repeats of a layer are alike
    after: list[int] = []  # the flags of the carry that a step gives
    sources, origin, reaching = [], "", [after]
    reached: set[str] = set()  # names of owners
    for step, moves in zip(steps[::-1], moving[::-1], strict=True):
        flags = _flags_of_outputs(step, after)
        kind = id(step.closed), tuple(moves), tuple(map(bool, flags))
        if kind not in known:
            known[kind] = _sources(step, moves, flags)
        from_outputs = known[kind]
        if any(step.sums and step.gives + 1 in outputs for outputs in from_outputs.values()):
            origin = step.name
        inputs = {i: _union(flags[k] for k in outputs) for i, outputs in from_outputs.items()}
        _refuse_weight(step, inputs, origin)
        first = len(step.paths)
        reached |= {
            roles.owners.get(step.paths[i], step.paths[i])
            for i, flags in inputs.items()
            if i < first and flags & _OBJECTIVE
        }
        after = [inputs.get(first + i, 0) for i in range(step.arriving)]
        sources.append(from_outputs)
        reaching.append(after)
    names = {path for step in steps for path in step.paths if roles.owners.get(path, path) in reached}
    return Flow(
        _borders(steps, sources[::-1], reaching[::-1]),
        frozenset(names),
        places_of_cuts(steps, reaching[::-1], frozenset(names)),
    )


def _flags_of_outputs(step: Step, after: Sequence[int]) -> list[int]:
    """Which cotangents a step's outputs have, given those of the carry."""
    flags = [*after, *([_OBJECTIVE, _WEIGHT] if step.sums else [])]
    return [
        flag * is_differentiable(var.aval) for flag, var in zip(flags, step.closed.jaxpr.outvars, strict=True)
    ]


def _steps(pipe: Pipeline, shapes: Sequence[LayerShapes], fields: Specs, roles: Roles) -> list[Step]:
    steps = []
    for index, own in enumerate(shapes):
        params = {str(index): own.params}
        trained = frozenset(roles.leaves(params).trained)
        arriving = len(jax.tree.leaves(own.carry_in))
        name = f"layer {index} ({pipe.layers[index].name})"
        leaves = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, _ in jax.tree_util.tree_leaves_with_path(own.carry_out)
        ]
        sums = len(own.traced.jaxpr.outvars) > len(leaves)
        steps.append(Step(name, own.traced, leaf_paths(params), trained, arriving, leaves, sums))
    carry = shapes[-1].carry_out
    loss = pipe.traced_loss(carry, fields)
    return [*steps, Step("the loss", loss, [], frozenset(), len(jax.tree.leaves(carry)), [], True)]


def _moving(steps: Sequence[Step]) -> list[list[bool]]:
    """For each step, which of its inputs may have a tangent: they follow from a parameter that is trained."""
    arriving: list[bool] = []
    found = []
    for step in steps:
        params = [i in step.trained for i in range(len(step.paths))]
        rest = len(step.closed.jaxpr.invars) - len(params) - len(arriving)
        found.append([*params, *arriving, *[False] * rest])
        arriving = may_move(step.closed, found[-1])[: step.gives]
    return found


def _sources(step: Step, moves: Sequence[bool], flags: Sequence[int]) -> Mapping[int, frozenset[int]]:
    """For each input that may have a tangent, the outputs whose cotangents reach it."""
    inputs = [i for i, may in enumerate(moves) if may]
    outputs = [k for k, flag in enumerate(flags) if flag]
    if not inputs or not outputs:
        return {}
    try:
        masks = reached(step.closed, inputs, outputs)
    except Exception as error:
        raise UsageError(
            f"{step.name} cannot be differentiated: {reason_of(error)}. For a loop, take jax.lax.scan or a "
            f"fori_loop of fixed length; where no gradient is wanted, jax.lax.stop_gradient before it"
        ) from error
    return {
        i: frozenset(k for bit, k in enumerate(outputs) if mask >> bit & 1)
        for i, mask in zip(inputs, masks, strict=True)
    }


def _refuse_weight(step: Step, inputs: Mapping[int, int], origin: str) -> None:
    for i, flags in inputs.items():
        if i < len(step.paths) and flags & _WEIGHT:
            raise UsageError(
                f"{origin}: Loss.weight depends on the parameter {step.paths[i]}, but weights are not "
                f"differentiated: the gradient would lack a part. Give weight=jax.lax.stop_gradient(...) "
                f"if that part is not wanted; else count in weight what does not depend on parameters "
                f"(tokens, rows), and put what does into the total"
            )


def _borders(
    steps: Sequence[Step], sources: Sequence[Mapping[int, frozenset[int]]], reaching: Sequence[Sequence[int]]
) -> list[Border]:
    """The leaves that the objective reaches and that truly follow from a trained parameter."""
    arriving: frozenset[int] = frozenset()
    borders = []
    for step, of, flags in zip(steps[:-1], sources, reaching, strict=False):
        borders.append(tuple(sorted(i for i in arriving if flags[i] & _OBJECTIVE)))
        first = len(step.paths)
        follows = [outputs for i, outputs in of.items() if i < first or i - first in arriving]
        arriving = frozenset().union(*follows) & frozenset(range(step.gives))
    return [*borders, ()]


def _union(flags: Any) -> int:
    union = 0
    for flag in flags:
        union |= flag
    return union


MOST_NAMES = 3


@dataclass(frozen=True)
class Step:
    """A layer, or last the loss: parameters, carry, the rest -> carry, and total and weight if it has them.

    Attributes:
        name: for messages.
        paths: names of all parameters.
        trained: indices of those that have a gradient.
        arriving: number of leaves of the carry that it gets.
        leaves: names of those that it gives.
        sums: whether total and weight are the last outputs.
    """

    name: str
    closed: ClosedJaxpr
    paths: Sequence[str]
    trained: frozenset[int]
    arriving: int
    leaves: Sequence[str]
    sums: bool

    @property
    def gives(self) -> int:
        """The number of leaves of the carry that it gives."""
        return len(self.leaves)

    def inputs(self, params: Iterable[int], carry: Iterable[int]) -> list[bool]:
        """Flags of its inputs: of these parameters, and these leaves of the carry."""
        chosen = {*params, *(len(self.paths) + i for i in carry)}
        return [i in chosen for i in range(len(self.closed.jaxpr.invars))]


def places_of_cuts(
    steps: Sequence[Step], reaching: Sequence[Sequence[int]], reached: frozenset[str]
) -> dict[int, str]:
    """Why layers would not train, by index; not of those whose parameters the loss does not follow from.

    Args:
        steps: the layers and the loss.
        reaching: for each step, which leaves of the carry that it gets have the objective's cotangent.
        reached: names of the parameters that have it.
    """
    silent = [
        k
        for k, step in enumerate(steps)
        if step.trained and not any(step.paths[i] in reached for i in step.trained)
    ]
    if not silent:
        return {}
    follows = [output_dependence(step.closed) for step in steps]
    needed = _needed(steps, follows)
    found = {k: _place(k, steps, follows, needed, reaching) for k in silent}
    return {k: place for k, place in found.items() if place}


def refuse_untrained(
    trained: Sequence[Sequence[str]], cuts: Sequence[Mapping[int, str]], reached: Iterable[frozenset[str]]
) -> None:
    """Refuse layers of which some bucket's gradient ends on its way, and no bucket's gets there.

    Args:
        trained: by layer, names of its trained parameters.
        cuts: of each bucket, see `places_of_cuts`.
        reached: of each bucket, the parameters with a gradient.

    Raises:
        UsageError: naming layers, parameters, and the place.
    """
    somewhere = frozenset[str]().union(*reached)
    places = {k: place for of in reversed(cuts) for k, place in of.items()}
    silent = [k for k in sorted(places) if somewhere.isdisjoint(trained[k])]
    if not silent:
        return
    said = []
    for place, group in groupby(silent, places.__getitem__):
        layers = list(group)
        names = [name for k in layers for name in trained[k]]
        shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
        said.append(f"{_layers(layers)} would not train, for no gradient reaches {shown}: {place}")
    remedy = "Let the loss follow from them through floating point numbers, by functions with a derivative"
    if any(names and k not in silent for k, names in enumerate(trained)):
        remedy += f"; if they shall keep their values: Pipeline(..., frozen={[f'{k}.*' for k in silent]})"
    raise UsageError(f"{'; '.join(said)}. {remedy}")


def _layers(indices: Sequence[int]) -> str:
    first, last = indices[0], indices[-1]
    if first == last:
        return f"layer {first}"
    whole = last - first + 1 == len(indices)
    return f"layers {first}-{last}" if whole else f"layers {', '.join(map(str, indices))}"


def _needed(steps: Sequence[Step], follows: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """For each step, the leaves of the carry it gets from which any total follows; last those it gives."""
    after: frozenset[int] = frozenset()
    found = [after]
    for step, masks in zip(steps[::-1], follows[::-1], strict=True):
        union = 0
        for k, mask in enumerate(masks):
            if k in after or (step.sums and k == step.gives):
                union |= mask
        first = len(step.paths)
        after = frozenset(i for i in range(step.arriving) if union >> first + i & 1)
        found.append(after)
    return found[::-1]


def _place(
    layer: int,
    steps: Sequence[Step],
    follows: Sequence[Sequence[int]],
    needed: Sequence[frozenset[int]],
    reaching: Sequence[Sequence[int]],
) -> str:
    """Where the gradient of a layer's parameters ends; empty if the loss does not follow from them."""
    params: Iterable[int] = steps[layer].trained
    moving, following = frozenset[int](), frozenset[int]()
    for k in range(layer, len(steps)):
        step, after = steps[k], needed[k + 1]
        inputs = step.inputs(params, following)
        mask = sum(1 << i for i, flag in enumerate(inputs) if flag)
        used = [j for j, own in enumerate(follows[k]) if own & mask and (j in after or j == step.gives)]
        if not used:
            return _unused(k, steps, needed)
        moves = may_move(step.closed, step.inputs(params, moving))
        flags = [*reaching[k + 1], 1] if step.sums else reaching[k + 1]
        if not any(moves[j] for j in used):
            return _end(step, used, step.inputs(params, moving), own=k == layer)
        if any(moves[j] and flags[j] & 1 for j in used):
            return f"it ends in {step.name}, whose derivative is zero"
        params, following = (), frozenset(j for j in used if j < step.gives)
        moving = frozenset(j for j in following if moves[j])
    return ""


def _unused(at: int, steps: Sequence[Step], needed: Sequence[frozenset[int]]) -> str:
    """The first step from here on that uses nothing of its carry, though the loss needs what it gives."""
    for k in range(at + 1, len(steps)):
        if not needed[k] and (needed[k + 1] or steps[k].sums):
            return f"{steps[k].name} does not use what {steps[k - 1].name} gives"
    return ""


def _end(step: Step, outputs: Sequence[int], moving: Sequence[bool], own: bool) -> str:
    """What in a step leaves these outputs without a tangent; empty if a layer stops its own parameters'."""
    live, reads = live_part(step.closed, [j in outputs for j in range(len(step.closed.jaxpr.outvars))])
    end = end_of_motion(live.jaxpr, [moving[i] for i in reads])
    if own and end is not None and end.equation.primitive.name == "stop_gradient":
        masks = dependence(step.closed)
        if not any(masks[v] >> len(step.paths) for v in end.outer.invars if not isinstance(v, Literal)):
            return ""
    line = f" ({end.line})" if end is not None and end.line else ""
    for j in outputs:
        made: Any = step.closed.jaxpr.outvars[j].aval
        if not is_differentiable(made):
            leaf = f"its carry leaf {step.leaves[j]}" if step.leaves[j] else "its carry"
            return f"{step.name} gives {leaf} as {made.dtype}{line}"
    return f"it ends in {step.name}" + (f", at {end.name}{line}" if end is not None else "")
