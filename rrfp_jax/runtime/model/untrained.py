"""Layers that would not train though the loss is computed from them, and the place where their gradient ends.

A parameter that the loss does not follow from is left alone, such as that of a head for evaluation; so is one
that its own layer puts behind `stop_gradient`. Refused are layers from which the loss follows only through
integers, rounding, or a `stop_gradient` further on, and layers that give what a later one does not use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import live_part
from rrfp_jax.runtime.autodiff.dataflow import dependence, output_dependence
from rrfp_jax.runtime.autodiff.reach import end_of_motion, is_differentiable, may_move

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
