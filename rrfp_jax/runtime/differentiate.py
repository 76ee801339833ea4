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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Literal, Var, jaxpr_as_fun

from rrfp_jax.runtime._jax import live_part
from rrfp_jax.runtime.dataflow import dependence

Specs: TypeAlias = Sequence[jax.ShapeDtypeStruct]
Flat: TypeAlias = Sequence[Any]

CHEAP = frozenset(
    [
        *("add", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square", "integer_pow", "clamp"),
        *("select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
        *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy"),
    ]
)
"""Elementwise primitives whose results are computed again rather than saved (no transcendental ones)."""

LOSS_COTANGENT = np.ones((), np.float32)
"""The loss's own cotangent, by which a traced backward begins; told from other constants by identity."""

StageFunction: TypeAlias = Callable[[Flat, Flat, Flat], tuple[Flat, Any, Any]]
"""(parameters, carry, inputs) -> (carry, scalar loss or None, statistics or None), in flat lists."""


@dataclass(frozen=True)
class Program:
    """A traced program and which entries of its full argument list it reads."""

    closed: ClosedJaxpr
    reads: tuple[int, ...]

    def __call__(self, *args: Any) -> list[Any]:
        """Apply it to the arguments that it reads."""
        return jaxpr_as_fun(self.closed)(*args)  # type: ignore[no-any-return]

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of the arguments that it reads."""
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.closed.jaxpr.invars]


@dataclass(frozen=True)
class Differentiated:
    """The programs of one stage for one shape bucket.

    Full argument lists, of which each program reads a part (`Program.reads`):

        prepare   parameters                                                     -> prepared
        forward   parameters, prepared, carry, inputs                            -> out, statistics, saved
        backward  parameters, prepared, carry, inputs, forward's outputs, cotangents
                                                                                 -> carry gradients, gradients

    Attributes:
        out: number of carry leaves that the forward sends on.
        moving_in: indices of the carry leaves that have a gradient (floating point).
        moving_out: the same for the carry that leaves the stage; cotangents come in this order.
        has_statistics: whether the forward's outputs hold a statistics vector after the carry.
        fixed: number of entries at the head of an argument list that all microbatches share.
        cotangents: index of the first cotangent in the backward's argument list.
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


def moving(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The indices of the leaves that gradients flow through."""
    return tuple(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def reduce(closed: ClosedJaxpr, outputs: Sequence[bool] | None = None) -> Program:
    """The program with only the chosen outputs, and no more inputs than they need."""
    live, reads = live_part(closed, outputs or [True] * len(closed.jaxpr.outvars))
    return Program(live, tuple(reads))


def differentiate(stage: StageFunction, params: Specs, carry: Specs, inputs: Specs) -> Differentiated:
    """Trace a stage and cut it into prepare, forward and backward.

    Args:
        stage: pure; see `StageFunction`.
        params: specs of the parameters.
        carry: specs of what arrives from the stage before.
        inputs: specs of the microbatch's fields and numbers.
    """
    flow_in = moving(carry)
    n_params, n_carry = len(params), len(carry)
    structure: Any = None
    sizes: dict[str, Any] = {}

    def with_residuals(*args: Any) -> list[Any]:
        nonlocal structure
        own, arrived = args[:n_params], list(args[n_params : n_params + n_carry])

        def objective(own: Flat, flowing: Flat) -> tuple[Any, Any]:
            for i, leaf in zip(flow_in, flowing, strict=True):
                arrived[i] = leaf
            out, loss, statistics = stage(own, arrived, args[n_params + n_carry :])
            flow_out = moving(out)
            sizes.update(out=len(out), flow_out=flow_out, loss=loss is not None, stats=statistics is not None)
            still = {i: leaf for i, leaf in enumerate(out) if i not in flow_out}
            return ([out[i] for i in flow_out], loss), (still, statistics)

        (flowing, _), vjp, (still, statistics) = jax.vjp(
            objective, own, [arrived[i] for i in flow_in], has_aux=True
        )
        residuals, structure = jax.tree.flatten(vjp)
        out = [still.get(i) for i in range(sizes["out"])]
        for i, leaf in zip(sizes["flow_out"], flowing, strict=True):
            out[i] = leaf
        return [*out, *([] if statistics is None else [statistics]), *residuals]

    whole = jax.make_jaxpr(with_residuals)(*params, *carry, *inputs)
    kept = sizes["out"] + sizes["stats"]
    plan = _plan_residuals(whole, n_params, kept)
    prepare = reduce(_given(whole, [], 0, plan.prepared)) if plan.prepared else None
    sent = [*whole.jaxpr.outvars[:kept], *plan.saved]
    forward = reduce(_given(whole, plan.prepared, n_params, sent))
    before = [*params, *map(_spec, plan.prepared), *carry, *inputs]
    given = [_spec(atom) for atom in sent]
    cotangents, first = [given[i] for i in sizes["flow_out"]], len(before) + len(given)

    def backward(*args: Any) -> list[Any]:
        stage_args, outputs = args[: len(before)], args[len(before) : len(before) + len(given)]
        residuals = plan.residuals(stage_args, outputs, n_params)
        vjp = jax.tree.unflatten(structure, residuals)
        flowing, one = list(args[first : first + len(cotangents)]), args[-1]
        gradients, carry_gradients = vjp((flowing, one if sizes["loss"] else None))
        return [*carry_gradients, *gradients]

    traced = jax.make_jaxpr(backward)(*before, *given, *cotangents, LOSS_COTANGENT)

    return Differentiated(
        prepare=prepare,
        forward=forward,
        backward=reduce(_with_constant(traced, LOSS_COTANGENT)),
        out=sizes["out"],
        moving_in=flow_in,
        moving_out=sizes["flow_out"],
        has_statistics=sizes["stats"],
        fixed=n_params + len(plan.prepared),
        cotangents=first,
    )


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


def _with_constant(closed: ClosedJaxpr, value: Any) -> ClosedJaxpr:
    """The program with its last input fixed."""
    jaxpr = closed.jaxpr
    bound = jaxpr.replace(constvars=[*jaxpr.constvars, jaxpr.invars[-1]], invars=jaxpr.invars[:-1])
    return ClosedJaxpr(bound, [*closed.consts, value])


def _spec(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
