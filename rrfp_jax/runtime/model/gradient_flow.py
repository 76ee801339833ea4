"""Which leaves of the carries have a gradient, through all layers of a model, as plain JAX would have it.

From the loss back to the first layer, each layer tells which of its inputs a cotangent reaches, and from
which of its outputs. A leaf between two layers has a gradient if the objective's cotangent reaches it, and if
it follows from a parameter that is trained. All others are sent without one.

A loss's weight is what the objective is divided by, and is not differentiated. So its cotangent is followed
in the same way, and must not reach any parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.autodiff.reach import is_differentiable, may_move, reached
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline, Specs
from rrfp_jax.runtime.model.raised import reason_of
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.model.untrained import Step, places_of_cuts

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
