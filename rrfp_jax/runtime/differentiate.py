"""A stage's forward and backward as two programs that pass each other as little as possible.

`jax.vjp` of a stage gives residuals: what the backward reads of the forward. Returned as they come they
would hold, for every microbatch in flight, a copy of the weights and of everything made from weights alone
(casts to bf16, reshapes). Here each residual is traced back to where it comes from:

    an input of the stage      kept by the runtime anyway: passed again, not copied
    weights alone              computed once a step by `prepare`, read by every forward and backward
    nothing (tables, masks)    computed again where it is needed
    cheap arithmetic on what   computed again: XLA fuses it into its user, which costs less than
    is there already           writing and reading it
    anything else              saved by the forward, once, even if it is used twice or sent on

All three programs take and give flat lists of arrays, so nothing is flattened in the dispatch loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Literal, Var

from rrfp_jax.runtime.dataflow import dependence
from rrfp_jax.runtime.splitbackward import Split, split
from rrfp_jax.runtime.traced import CHEAP, SCALE, Program, Specs, reduce, spec_of

Flat: TypeAlias = Sequence[Any]

StageFunction: TypeAlias = Callable[[Flat, Flat, Flat], tuple[Flat, Any, Any]]
"""(parameters, carry, inputs) -> (carry, scalar loss or None, statistics or None), in flat lists."""


@dataclass(frozen=True)
class Differentiated:
    """The programs of one stage for one shape bucket.

    Full argument lists, of which each program reads a part (`Program.reads`):

        prepare   parameters                                                     -> prepared
        forward   parameters, prepared, carry, inputs                            -> out, statistics, saved
        backward  parameters, prepared, carry, inputs, forward's outputs, cotangents, loss scale
                                                                                 -> carry gradients, gradients

    The backward is also to be had as two programs (`splitbackward.py`), traced when they are asked for:

        input     what backward reads                   -> carry gradients, crossing
        weight    what backward reads, then crossing    -> gradients

    Attributes:
        out: number of carry leaves that the forward sends on.
        moving_in: indices of the carry leaves that have a gradient (floating point).
        moving_out: the same for the carry that leaves the stage; cotangents come in this order.
        has_statistics: whether the forward's outputs hold a statistics vector after the carry.
        fixed: number of entries at the head of an argument list that all microbatches share.
        cotangents: index of the first cotangent in the backward's argument list, which ends with the loss
            scale: the cotangent of the loss.
    """

    prepare: Program | None
    forward: Program
    backward: Program
    out: int
    moving_in: tuple[int, ...]
    moving_out: tuple[int, ...]
    has_statistics: bool
    fixed: int
    cotangents: int

    @cached_property
    def _split(self) -> Split:
        arriving = len(self.moving_out) + 1
        return split(self.backward, len(self.moving_in), self.fixed, self.cotangents, arriving)

    @property
    def input(self) -> Program:
        """The part of the backward that the stage before waits for."""
        return self._split.input

    @property
    def weight(self) -> Program:
        """The rest of it."""
        return self._split.weight

    @property
    def crossing(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of what `weight` needs of `input`'s work."""
        return self._split.crossing


def moving(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The indices of the leaves that gradients flow through."""
    return tuple(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def differentiate(
    stage: StageFunction,
    params: Specs,
    carry: Specs,
    inputs: Specs,
    trainable: Sequence[bool] | None = None,
    input_gradient: bool = True,
) -> Differentiated:
    """Trace a stage and cut it into prepare, forward and backward.

    What no chosen gradient needs is neither saved nor computed: frozen layers below the first trainable one
    have no backward if the carry's gradient is not wanted either.

    Args:
        stage: pure; see `StageFunction`.
        params: specs of the parameters.
        carry: specs of what arrives from the stage before.
        inputs: specs of the microbatch's fields and numbers.
        trainable: for each parameter, whether it has a gradient; all of them if None.
        input_gradient: whether the carry has one, for anything trainable in the stages before.
    """
    flow_in = moving(carry) if input_gradient else ()
    own = tuple(range(len(params))) if trainable is None else tuple(i for i, t in enumerate(trainable) if t)
    whole, facts = _trace_with_residuals(stage, params, carry, inputs, own, flow_in)
    kept = facts.out + facts.has_statistics
    plan = _plan_residuals(whole, len(params), kept)
    prepare = reduce(_given(whole, [], 0, plan.prepared)) if plan.prepared else None
    sent = [*whole.jaxpr.outvars[:kept], *plan.saved]
    before = [*params, *map(spec_of, plan.prepared), *carry, *inputs]
    given = [spec_of(atom) for atom in sent]
    cotangents, first = [given[i] for i in facts.moving_out], len(before) + len(given)

    def backward(*args: Any) -> list[Any]:
        residuals = plan.residuals(args[: len(before)], args[len(before) : first], len(params))
        vjp = jax.tree.unflatten(facts.structure, residuals)
        gradients, carry_gradients = vjp((list(args[first:-1]), args[-1] if facts.has_loss else None))
        return [*carry_gradients, *gradients]

    return Differentiated(
        prepare=prepare,
        forward=reduce(_given(whole, plan.prepared, len(params), sent)),
        backward=reduce(jax.make_jaxpr(backward)(*before, *given, *cotangents, SCALE)),
        out=facts.out,
        moving_in=flow_in,
        moving_out=facts.moving_out,
        has_statistics=facts.has_statistics,
        fixed=len(params) + len(plan.prepared),
        cotangents=first,
    )


@dataclass(frozen=True)
class _Facts:
    """What tracing a stage tells besides its program; `structure` is that of the residuals."""

    out: int
    moving_out: tuple[int, ...]
    has_loss: bool
    has_statistics: bool
    structure: Any


def _trace_with_residuals(
    stage: StageFunction,
    params: Specs,
    carry: Specs,
    inputs: Specs,
    own: Sequence[int],
    flow_in: Sequence[int],
) -> tuple[ClosedJaxpr, _Facts]:
    """The program parameters, carry, inputs -> out, statistics, residuals.

    Args:
        own: indices of the parameters that get a gradient.
        flow_in: those of the carry.
    """
    n, m = len(params), len(params) + len(carry)
    facts: Any = None

    def traced(*args: Any) -> list[Any]:
        nonlocal facts
        weights, arrived = list(args[:n]), list(args[n:m])

        def objective(chosen: Flat, flowing: Flat) -> tuple[Any, Any]:
            for i, leaf in zip(own, chosen, strict=True):
                weights[i] = leaf
            for i, leaf in zip(flow_in, flowing, strict=True):
                arrived[i] = leaf
            out, loss, statistics = stage(weights, arrived, args[m:])
            flow_out = moving(out) if own or flow_in else ()  # else nobody sends a cotangent
            still = {i: leaf for i, leaf in enumerate(out) if i not in flow_out}
            return ([out[i] for i in flow_out], loss), (still, flow_out, statistics)

        chosen, flowing = [weights[i] for i in own], [arrived[i] for i in flow_in]
        (moved, loss), vjp, (still, flow_out, statistics) = jax.vjp(objective, chosen, flowing, has_aux=True)
        residuals, structure = jax.tree.flatten(vjp)
        out = still | dict(zip(flow_out, moved, strict=True))
        facts = _Facts(len(out), flow_out, loss is not None, statistics is not None, structure)
        return [*(out[i] for i in range(len(out))), *([] if statistics is None else [statistics]), *residuals]

    return jax.make_jaxpr(traced)(*params, *carry, *inputs), facts


@dataclass(frozen=True)
class _ResidualPlan:
    """Where each residual comes from; see the module's text."""

    whole: ClosedJaxpr
    kept: int
    prepared: Sequence[Var]
    saved: Sequence[Var]
    rebuilt: Sequence[Var]

    def residuals(self, stage_args: Flat, outputs: Flat, n_params: int) -> list[Any]:
        """The residuals in order, from a backward's arguments."""
        jaxpr, ready = self.whole.jaxpr, len(self.prepared)
        sent = (*jaxpr.outvars[: self.kept], *self.saved)
        inputs = [*stage_args[:n_params], *stage_args[n_params + ready :]]
        known = {v: value for v, value in zip(sent, outputs, strict=True) if isinstance(v, Var)}
        known.update(zip(self.prepared, stage_args[n_params:], strict=False))
        produced = [v for v in known if v not in set(jaxpr.invars)]
        known.update(zip(jaxpr.constvars, self.whole.consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))
        if self.rebuilt:
            names = [*jaxpr.invars, *produced]
            program = reduce(_given(self.whole, produced, len(jaxpr.invars), self.rebuilt))
            known.update(zip(self.rebuilt, program(*(known[names[i]] for i in program.reads)), strict=True))
        return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars[self.kept :]]


def _plan_residuals(whole: ClosedJaxpr, n_params: int, kept: int) -> _ResidualPlan:
    """Walk through the forward, saving what is wanted and can be had no other way."""
    jaxpr, masks = whole.jaxpr, dependence(whole)
    weights = (1 << n_params) - 1
    sent = {v for v in jaxpr.outvars[:kept] if isinstance(v, Var)}
    at_hand = {*jaxpr.invars, *jaxpr.constvars, *sent}
    wanted = dict.fromkeys(v for v in jaxpr.outvars[kept:] if isinstance(v, Var) and v not in at_hand)
    prepared = [v for v in wanted if masks[v] and not masks[v] & ~weights]
    available = at_hand | set(prepared)
    saved: list[Var] = []
    for equation in jaxpr.eqns:
        read = [v for v in equation.invars if not isinstance(v, Literal)]
        given = all(v in available for v in read)
        if given and (equation.primitive.name in CHEAP or not any(masks[v] for v in read)):
            available.update(equation.outvars)
        else:
            needed = [v for v in equation.outvars if v in wanted and v not in available]
            saved += needed
            available.update(needed)
    rebuilt = [v for v in wanted if v not in {*saved, *prepared}]
    return _ResidualPlan(whole, kept, prepared, saved, rebuilt)


def _given(closed: ClosedJaxpr, known: Sequence[Var], at: int, outputs: Sequence[Any]) -> ClosedJaxpr:
    """The program with the values of `known` as further inputs, from position `at` on, and other outputs."""
    jaxpr, given, equations = closed.jaxpr, set(known), []
    for equation in jaxpr.eqns:
        if not any(var in given for var in equation.outvars):
            equations.append(equation)
        elif not all(var in given or isinstance(var, DropVar) for var in equation.outvars):
            rest = [DropVar(var.aval) if var in given else var for var in equation.outvars]
            equations.append(equation.replace(outvars=rest))
    inputs = [*jaxpr.invars[:at], *known, *jaxpr.invars[at:]]
    return ClosedJaxpr(jaxpr.replace(invars=inputs, outvars=list(outputs), eqns=equations), closed.consts)
