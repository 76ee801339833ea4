"""A stage's forward and backward as programs that pass each other as little as possible.

The backward reads from the forward only what it cannot get otherwise (`residuals.py`). What follows from
weights alone is computed once a step. The backward may be split in two (`split_backward.py`), and it may do
the forward as well (`join`).

All programs take and give flat lists of arrays, so nothing is flattened in the dispatch loop.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from rrfp_jax.random_keys import as_key, plain
from rrfp_jax.runtime.autodiff.residuals import hoist, plan_residuals, prepared_too, residuals
from rrfp_jax.runtime.autodiff.split_backward import split
from rrfp_jax.runtime.autodiff.traced import (
    SCALE,
    Program,
    Specs,
    inline,
    reduce,
    spec_of,
    with_given,
    without_outputs,
)

Flat: TypeAlias = Sequence[Any]
Places: TypeAlias = Sequence[int]

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

    The backward as two programs (`split_backward.py`), made when they are asked for:

        input     what backward reads                          -> carry gradients, crossing
        weight    what backward reads, then input's outputs    -> gradients

    If they are joined, the forward does nothing, and backward and input give statistics after the carry
    gradients.
    """

    prepare: Program
    forward: Program
    backward: Program
    out: int  # number of carry leaves that the forward sends on, before a statistics vector if there is one
    moving_in: tuple[int, ...]  # indices of the carry leaves that have a gradient
    moving_out: tuple[int, ...]  # the same for the carry that leaves the stage, in the order of cotangents
    has_statistics: bool
    fixed: int  # number of entries at the head of an argument list that all microbatches share
    cotangents: int  # index of the first in the backward's argument list, which ends with the loss scale
    joined: bool = False  # whether the backward does the forward, too

    def gives_statistics(self, flow: int) -> bool:
        """Whether tasks of this flow (`KindRow.flow`) give the vector of statistics."""
        return self.has_statistics and flow == (-1 if self.joined else 1)

    @property
    def passed(self) -> dict[int, int]:
        """By index, leaves that the forward sends on as they are, and the arguments that they are."""
        jaxpr = self.forward.closed.jaxpr
        places: dict[Any, int] = dict(zip(jaxpr.invars, self.forward.reads, strict=True))
        sent = enumerate(jaxpr.outvars[: self.out])
        return {i: places[v] for i, v in sent if isinstance(v, Var) and v in places}

    @cached_property
    def _split(self) -> tuple[Program, Program]:
        arriving, first = len(self.moving_out) + 1, len(self.moving_in) + self.gives_statistics(-1)
        return split(self.backward, first, self.fixed, self.cotangents, arriving)

    @property
    def input(self) -> Program:
        """The part of the backward that the stage before waits for."""
        return self._split[0]

    @property
    def weight(self) -> Program:
        return self._split[1]


def moving(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The indices of the leaves that gradients flow through."""
    return tuple(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def differentiate(
    stage: StageFunction,
    params: Specs,
    carry: Specs,
    inputs: Specs,
    trainable: Sequence[bool] | None = None,
    carry_gradients: Places | None = None,
    cotangents: Places | None = None,
) -> Differentiated:
    """Trace a stage and cut it into prepare, forward and backward.

    What no chosen gradient needs is neither saved nor computed: frozen layers below the first trainable one
    have no backward if the carry's gradient is not wanted either.

    Args:
        stage: pure, of these parameters, what arrives from the stage before, and a microbatch's fields and
            numbers.
        trainable: for each parameter, whether it has a gradient; all of them if None.
        carry_gradients: indices of the leaves of the carry that have one; all that could if None.
        cotangents: indices of the leaves sent on whose cotangents arrive; all that could if None.
    """
    flow_in = moving(carry) if carry_gradients is None else tuple(carry_gradients)
    own = tuple(range(len(params))) if trainable is None else tuple(i for i, t in enumerate(trainable) if t)
    chosen = [*own, *(len(params) + i for i in flow_in)]
    whole, facts = _trace_with_residuals(stage, params, carry, inputs, chosen, cotangents)
    kept = facts.out + facts.has_statistics
    prepared, saved = plan_residuals(whole, len(params), kept)
    prepare = with_given(whole, prepared, quiet=True)
    sent = [*whole.jaxpr.outvars[:kept], *saved]
    rebuilt = residuals(whole, len(params), prepared, sent, kept)
    before = [*params, *map(spec_of, prepared), *carry, *inputs]
    given = [spec_of(atom) for atom in sent]
    arriving, first = [given[i] for i in facts.moving_out], len(before) + len(given)

    def backward(*args: Any) -> list[Any]:
        found = rebuilt(*(args[i] for i in rebuilt.reads))
        vjp = jax.tree.unflatten(facts.structure, map(as_key, facts.residuals, found))
        scale = None if facts.loss is None else args[-1].astype(facts.loss)
        (gradients,) = vjp((list(args[first:-1]), scale))
        return [*gradients[len(own) :], *gradients[: len(own)]]

    traced = reduce(jax.make_jaxpr(backward)(*before, *given, *arriving, SCALE))
    fixed = len(params) + len(prepared)
    rest, early = hoist(traced, fixed)
    forward, more = with_given(whole, sent, prepared, len(params)), 0
    if early is not None:
        prepare, more = prepared_too(prepare, early, params), len(early.closed.jaxpr.outvars)
        forward = Program(forward.closed, tuple(i + more * (i >= fixed) for i in forward.reads))
    read = {*forward.reads, *rest.reads}  # not what is prepared only to make other values of it
    unread = [i for i in range(len(params), fixed + more) if i not in read]
    places = {i: i - bisect(unread, i) for i in read}
    return Differentiated(
        prepare=without_outputs(prepare, [i - len(params) for i in unread]),
        forward=forward.at(places),
        backward=rest.at(places),
        out=facts.out,
        moving_in=flow_in,
        moving_out=facts.moving_out,
        has_statistics=facts.has_statistics,
        fixed=fixed + more - len(unread),
        cotangents=first + more - len(unread),
    )


def join(apart: Differentiated) -> Differentiated:
    """A stage that sends nothing on, whose backward follows at once, with both as one program.

    XLA sees both, and nothing is held between them.
    """
    forward, backward, moving = apart.forward, apart.backward, len(apart.moving_in)
    before = apart.cotangents - len(forward.closed.jaxpr.outvars)
    specs = {i: spec for own in (forward, backward) for i, spec in zip(own.reads, own.specs, strict=True)}
    reads = sorted(i for i in specs if i < before)

    def both(*args: Any) -> list[Any]:
        at_hand = dict(zip(reads, args[:-1], strict=True))
        made = forward(*(at_hand[i] for i in forward.reads))
        at_hand |= dict(enumerate([*made, args[-1]], before))
        results = backward(*(at_hand[i] for i in backward.reads))
        return [*results[:moving], *made[: apart.has_statistics], *results[moving:]]

    program = reduce(jax.make_jaxpr(both)(*(specs[i] for i in reads), SCALE)).at([*reads, before])
    nothing = reduce(jax.make_jaxpr(lambda: [])())
    return replace(apart, forward=nothing, backward=program, cotangents=before, joined=True)


class _Facts(NamedTuple):
    """What tracing a stage tells besides its program: `loss` is its dtype, `residuals` are specs."""

    out: int
    moving_out: tuple[int, ...]
    loss: Any
    has_statistics: bool
    structure: Any
    residuals: Sequence[Any]


def _trace_with_residuals(
    stage: StageFunction, params: Specs, carry: Specs, inputs: Specs, chosen: Places, arriving: Places | None
) -> tuple[ClosedJaxpr, _Facts]:
    """The program parameters, carry, inputs -> out, statistics, residuals.

    Gradients are of the `chosen` parameters and leaves of the carry; cotangents come for leaves `arriving`.
    """
    n, m = len(params), len(params) + len(carry)
    facts: Any = None

    def traced(*args: Any) -> list[Any]:
        nonlocal facts
        values = list(args)

        def objective(varied: Flat) -> tuple[Any, Any]:
            for i, leaf in zip(chosen, varied, strict=True):
                values[i] = leaf
            out, loss, statistics = stage(values[:n], values[n:m], values[m:])
            flow_out = moving(out) if arriving is None else tuple(arriving)
            flow_out = flow_out if chosen else ()  # else nobody sends a cotangent
            still = {i: leaf for i, leaf in enumerate(out) if i not in flow_out}
            return ([out[i] for i in flow_out], loss), (still, flow_out, statistics)

        varied = [args[i] for i in chosen]
        (moved, loss), vjp, (still, flow_out, statistics) = jax.vjp(objective, varied, has_aux=True)
        residuals, structure = jax.tree.flatten(vjp)
        out = still | dict(zip(flow_out, moved, strict=True))
        specs = [jax.typeof(leaf) for leaf in residuals]
        has_statistics = statistics is not None
        facts = _Facts(len(out), flow_out, getattr(loss, "dtype", None), has_statistics, structure, specs)
        return [*(out[i] for i in range(len(out))), *[statistics][:has_statistics], *map(plain, residuals)]

    whole = jax.make_jaxpr(traced)(*params, *carry, *inputs)
    return inline(whole), facts  # a call's cheap results are computed again like any others
