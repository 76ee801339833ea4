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
from jax.extend.core import ClosedJaxpr

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.autodiff.reach import is_differentiable, may_move, reached
from rrfp_jax.runtime.model.given import reason_of
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline, Specs
from rrfp_jax.runtime.model.roles import Roles

Border: TypeAlias = tuple[int, ...]
"""Indices of the leaves of a carry that have a gradient."""

_OBJECTIVE, _WEIGHT = 1, 2
"""Flags of values that these two cotangents reach."""


@dataclass(frozen=True)
class _Step:
    """A layer, or last the loss: parameters, carry, the rest -> carry, and total and weight if it has them.

    Attributes:
        name: for messages.
        paths: names of all parameters.
        trained: indices of those that have a gradient.
        arriving: number of leaves of the carry that it gets.
        sums: whether total and weight are the last outputs.
    """

    name: str
    closed: ClosedJaxpr
    paths: Sequence[str]
    trained: frozenset[int]
    arriving: int
    sums: bool

    @property
    def gives(self) -> int:
        """The number of leaves of the carry that it gives."""
        return len(self.closed.jaxpr.outvars) - 2 * self.sums

    def flags_of_outputs(self, after: Sequence[int]) -> list[int]:
        """Which cotangents its outputs have, given those of the carry."""
        flags = [*after, *([_OBJECTIVE, _WEIGHT] if self.sums else [])]
        return [
            flag * is_differentiable(var.aval)
            for flag, var in zip(flags, self.closed.jaxpr.outvars, strict=True)
        ]


def gradient_flow(pipe: Pipeline, shapes: Sequence[LayerShapes], fields: Specs, roles: Roles) -> list[Border]:
    """For each layer, which leaves of the carry that it gets have a gradient; last ().

    Raises:
        UsageError: a layer that must be differentiated cannot be, or a loss's weight depends on a parameter.
    """
    steps = _steps(pipe, shapes, fields, roles)
    moving = _moving(steps)
    known: dict[Any, Mapping[int, frozenset[int]]] = {}  # repeats of a layer are alike
    after: list[int] = []  # the flags of the carry that a step gives
    sources, origin, reaching = [], "", [after]
    for step, moves in zip(steps[::-1], moving[::-1], strict=True):
        flags = step.flags_of_outputs(after)
        kind = id(step.closed), tuple(moves), tuple(map(bool, flags))
        if kind not in known:
            known[kind] = _sources(step, moves, flags)
        from_outputs = known[kind]
        if any(step.sums and step.gives + 1 in outputs for outputs in from_outputs.values()):
            origin = step.name
        inputs = {i: _union(flags[k] for k in outputs) for i, outputs in from_outputs.items()}
        _refuse_weight(step, inputs, origin)
        first = len(step.paths)
        after = [inputs.get(first + i, 0) for i in range(step.arriving)]
        sources.append(from_outputs)
        reaching.append(after)
    return _borders(steps, sources[::-1], reaching[::-1])


def _steps(pipe: Pipeline, shapes: Sequence[LayerShapes], fields: Specs, roles: Roles) -> list[_Step]:
    steps = []
    for index, own in enumerate(shapes):
        params = {str(index): own.params}
        trained = frozenset(roles.leaves(params).trained)
        arriving = len(jax.tree.leaves(own.carry_in))
        name = f"layer {index} ({pipe.layers[index].name})"
        sums = len(own.traced.jaxpr.outvars) > len(jax.tree.leaves(own.carry_out))
        steps.append(_Step(name, own.traced, leaf_paths(params), trained, arriving, sums))
    carry = shapes[-1].carry_out
    loss = pipe.traced_loss(carry, fields)
    return [*steps, _Step("the loss", loss, [], frozenset(), len(jax.tree.leaves(carry)), True)]


def _moving(steps: Sequence[_Step]) -> list[list[bool]]:
    """For each step, which of its inputs may have a tangent: they follow from a parameter that is trained."""
    arriving: list[bool] = []
    found = []
    for step in steps:
        params = [i in step.trained for i in range(len(step.paths))]
        rest = len(step.closed.jaxpr.invars) - len(params) - len(arriving)
        found.append([*params, *arriving, *[False] * rest])
        arriving = may_move(step.closed, found[-1])[: step.gives]
    return found


def _sources(step: _Step, moves: Sequence[bool], flags: Sequence[int]) -> Mapping[int, frozenset[int]]:
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


def _refuse_weight(step: _Step, inputs: Mapping[int, int], origin: str) -> None:
    for i, flags in inputs.items():
        if i < len(step.paths) and flags & _WEIGHT:
            raise UsageError(
                f"{origin}: Loss.weight depends on the parameter {step.paths[i]}, but weights are not "
                f"differentiated: the gradient would lack a part. Give weight=jax.lax.stop_gradient(...) "
                f"if that part is not wanted; else count in weight what does not depend on parameters "
                f"(tokens, rows), and put what does into the total"
            )


def _borders(
    steps: Sequence[_Step], sources: Sequence[Mapping[int, frozenset[int]]], reaching: Sequence[Sequence[int]]
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
