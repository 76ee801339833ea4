"""What a backward reads from its forward, and where it gets that from.

`jax.vjp` of a stage gives residuals: what the backward reads from the forward. If they were returned as they
are, every microbatch in flight would hold a copy of the weights and of everything made from weights alone
(casts to bf16, reshapes). Here each residual is traced back to where it comes from:

    an input of the stage      kept by the runtime anyway: passed again, not copied
    weights alone              computed once a step by `prepare`, read by every forward and backward
    nothing, cheaply (masks)   computed again where it is needed
    nothing, a table (cosines  as what follows from weights alone, unless all tables together are larger
    of positions)              than what a microbatch brings and sends on: then as masks
    cheap arithmetic on what   computed again: XLA fuses it into its user, which costs less than
    is there already           writing and reading it
    anything else              saved by the forward, once, even if it is used twice or sent on; or what it
                               follows from cheaply, if that is fewer bytes: a norm keeps the bfloat16 that it
                               reads, and means, instead of two float32 arrays

A comparison is computed again only of numbers that are the forward's to the bit; else what it gives is saved.

What a rematerialised layer's backward computes from weights alone is no residual, and would be computed again
for every microbatch; if both halves of a split backward read it, each microbatch between them would hold a
copy of the weights. So it is taken out of the backward (`hoist`), and computed once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

from rrfp_jax.errors import UsageError
from rrfp_jax.random_keys import is_key
from rrfp_jax.runtime.autodiff.split_backward import SINK, SOURCE, UNCUTTABLE, FlowNetwork
from rrfp_jax.runtime.autodiff.traced import (
    BARRIER,
    CALLBACKS,
    CHEAP,
    Program,
    Specs,
    dependence,
    inline,
    is_exact,
    is_repeatable,
    jumps,
    made_of,
    reduce,
    runs_once,
    with_given,
    without_barriers,
)
from rrfp_jax.runtime.sizes import nbytes

TABLE_SHARE = 16
"""What is computed once a step costs so much less than what is saved of every microbatch."""


def residuals(
    whole: ClosedJaxpr, n_params: int, prepared: Sequence[Var], sent: Sequence[Any], kept: int
) -> Program:
    """The residuals, all outputs of a program but the first `kept`, from what a backward is given.

    That is parameters, prepared values, the program's other inputs, and what the forward has `sent` or saved.
    """
    inputs = whole.jaxpr.invars
    given = [*inputs[:n_params], *prepared, *inputs[n_params:], *sent]
    place = {v: i for i, v in reversed([*enumerate(given)]) if isinstance(v, Var)}
    made = [v for v in place if v not in set(inputs)]
    program = with_given(whole, whole.jaxpr.outvars[kept:], made, len(inputs), quiet=True)
    return program.at([place[v] for v in (*inputs, *made)])


def plan_residuals(whole: ClosedJaxpr, n_params: int, kept: int) -> tuple[list[Var], list[Var]]:
    """What to prepare once a step, and what each forward must save, besides the `kept` first outputs.

    These are the fewest bytes from which all residuals follow cheaply that can be had no other way.
    """
    jaxpr, masks = whole.jaxpr, dependence(whole)
    most = nbytes([atom.aval for atom in (*jaxpr.invars[n_params:], *jaxpr.outvars[:kept])])
    of_weights = {v for v, mask in masks.items() if 0 < mask < 1 << n_params}
    sent = {v for v in jaxpr.outvars[:kept] if isinstance(v, Var)}
    given = {*jaxpr.invars, *jaxpr.constvars, *sent}
    wanted = dict.fromkeys(v for v in jaxpr.outvars[kept:] if isinstance(v, Var) and v not in given)
    also = _compared(jaxpr, jaxpr.invars[:n_params], of_weights) if wanted else ()
    prepared = [v for v in {**wanted, **dict.fromkeys(also)} if v in of_weights and v not in given]
    given.update(prepared)
    for tables in (True, False):
        available = _available(jaxpr, masks, given, tables)
        rest = [v for v in wanted if v not in available]
        chosen = _fewest_bytes(rest, jaxpr.eqns, available, {v for v in masks if not masks[v]})
        if nbytes([v.aval for v in chosen if not masks[v]]) <= most:
            break
    prepared += [v for v in chosen if v in of_weights or not masks[v]]
    saved = [v for e in jaxpr.eqns for v in e.outvars if v in chosen and v not in prepared]
    return prepared, saved


def _available(jaxpr: Any, masks: Mapping[Var, int], given: Set[Any], tables: bool) -> set[Any]:
    """What a backward can compute again: cheaply from what it is given, or from nothing.

    If there are to be `tables`, what is made from nothing, and not cheaply, is left out.
    """
    exact = made_of(given, filter(is_exact, jaxpr.eqns))

    def again(equation: JaxprEqn) -> bool:
        read = [v for v in equation.invars if not isinstance(v, Literal)]
        if equation.primitive.name in CHEAP and (exact.issuperset(read) or not jumps(equation)):
            return True
        alone = not any(masks[v] for v in read) and not runs_once(equation)
        return alone and (is_repeatable(equation) or not tables)

    return made_of(given, filter(again, jaxpr.eqns))


def _fewest_bytes(
    wanted: Sequence[Var], equations: Sequence[JaxprEqn], available: Set[Any], tables: Set[Var]
) -> list[Any]:
    """The values to be saved so that the wanted ones follow from them, and what is available, cheaply.

    Tables are there once, for all microbatches, and count as little. By a minimum cut: node ("has", v) is on
    the sink's side if the backward has v, ("makes", v) if it computes v itself, by cheap arithmetic on what
    it has.
    """
    producers = {v: equation for equation in equations for v in equation.outvars}
    network = FlowNetwork()
    for v in wanted:
        network.edge(("has", v), SINK)
    pending, placed = list(wanted), dict[Any, None]()
    while pending:
        v = pending.pop()
        if v in placed:
            continue
        placed[v] = None
        size = UNCUTTABLE if is_key(v.aval) else nbytes(v.aval)
        network.edge(("makes", v), ("has", v), -(-size // TABLE_SHARE) if v in tables else size)
        if producers[v].primitive.name not in CHEAP or jumps(producers[v]):
            network.edge(SOURCE, ("makes", v))
            continue
        for u in producers[v].invars:
            if not isinstance(u, Literal) and u not in available:
                network.edge(("has", u), ("makes", v))
                pending.append(u)
    backward = network.sink_side()
    return [v for v in placed if ("has", v) in backward and ("makes", v) not in backward]


def hoist(backward: Program, fixed: int) -> tuple[Program, Program | None]:
    """Take out of a program what costs more than cheap arithmetic on the `fixed` head of its arguments.

    Returns the rest of the program, whose argument list has the values taken out right after the head, and
    the program that computes them from the head; the program itself and None if there are none.
    """
    flat = inline(backward.closed)
    bare = without_barriers(flat)
    taken = _costly(bare, [v for i, v in zip(backward.reads, bare.jaxpr.invars, strict=True) if i < fixed])
    if not taken:
        return backward, None
    early = with_given(bare, taken, quiet=True)
    head = sum(i < fixed for i in backward.reads)
    places = [i if i < fixed else i + len(taken) for i in backward.reads]
    places[head:head] = range(fixed, fixed + len(taken))
    return with_given(flat, flat.jaxpr.outvars, taken, head).at(places), early.at(backward.reads)


def _costly(bare: ClosedJaxpr, weights: list[Var]) -> list[Var]:
    """The values made from weights, not cheaply, that something else is made from."""
    jaxpr = bare.jaxpr
    pure = [equation for equation in jaxpr.eqns if not runs_once(equation)]
    known = made_of([*jaxpr.constvars, *weights], pure) - made_of(jaxpr.constvars, pure)
    costly: dict[Any, None] = {}
    read_by_others = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation in jaxpr.eqns:
        if known.isdisjoint(equation.outvars) or is_repeatable(equation):
            read_by_others.update(v for v in equation.invars if not isinstance(v, Literal))
        else:
            costly.update(dict.fromkeys(equation.outvars))
    costly.update(dict.fromkeys(_compared(jaxpr, weights, known)))
    return [v for v in costly if v in read_by_others]


def _compared(jaxpr: Any, weights: Collection[Var], of_weights: set[Any]) -> list[Any]:
    """Of what follows from weights alone: what comparisons give, or else read: one rounding for all programs.

    Not what has the same bits in all.
    """
    exact = made_of([*jaxpr.constvars, *weights], filter(is_exact, jaxpr.eqns))
    found = set[Any]()
    for equation in reversed(jaxpr.eqns):
        if jumps(equation) or (is_exact(equation) and not found.isdisjoint(equation.outvars)):
            own = equation.outvars if of_weights.issuperset(equation.outvars) else equation.invars
            found.update(v for v in own if not isinstance(v, (Literal, DropVar)))
    made = (v for equation in jaxpr.eqns if equation.primitive.name != BARRIER for v in equation.outvars)
    return [v for v in made if v in found and v in of_weights and v not in exact]


def prepared_too(prepare: Program, early: Program, params: Specs) -> Program:
    """`prepare` with the values that `early` makes of parameters and its own values after these."""

    def both(*args: Any) -> list[Any]:
        made = prepare(*(args[i] for i in prepare.reads))
        head = [*args, *made]
        return [*made, *early(*(head[i] for i in early.reads))]

    return reduce(jax.make_jaxpr(both)(*params))


NONE, FULL = "none", "full"

POLICIES = (
    *("everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"),
    *("checkpoint_dots", "checkpoint_dots_with_no_batch_dims"),
)
"""The policies of `jax.checkpoint_policies` that need no arguments."""


def check_remat(remat: str) -> None:
    """Refuse an unknown name, with those that there are."""
    known = (NONE, FULL, *POLICIES)
    if remat not in known:
        raise UsageError(f"remat={remat!r}: unknown; give one of: {', '.join(known)}")


def rematerialised(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """The function as it is ("none"), saving its arguments only ("full"), or by a policy's name.

    What a function on the host gives is always saved: such a function may be slow, and if it is not as pure
    as it should be, a second call gives something else.
    """
    if remat == NONE:
        return layer
    policy = getattr(jax.checkpoint_policies, "nothing_saveable" if remat == FULL else remat)

    def saved(primitive: Any, *args: Any, **params: Any) -> Any:
        return primitive.name in CALLBACKS or policy(primitive, *args, **params)

    return jax.checkpoint(layer, policy=saved)  # type: ignore[no-any-return]
