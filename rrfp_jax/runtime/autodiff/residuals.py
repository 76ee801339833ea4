"""What a backward reads from its forward, and where it gets that from.

`jax.vjp` of a stage gives residuals: what the backward reads from the forward. If they were returned as they
are, every microbatch in flight would hold a copy of the weights and of everything made from weights alone
(casts to bf16, reshapes). Here each residual is traced back to where it comes from:

    an input of the stage      kept by the runtime anyway: passed again, not copied
    weights alone              computed once a step by `prepare`, read by every forward and backward
    nothing (tables, masks)    computed again where it is needed
    cheap arithmetic on what   computed again: XLA fuses it into its user, which costs less than
    is there already           writing and reading it
    anything else              saved by the forward, once, even if it is used twice or sent on; or what it
                               follows from cheaply, if that is fewer bytes: a norm keeps the bfloat16 that it
                               reads, and means, instead of two float32 arrays
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from rrfp_jax.random_keys import is_key
from rrfp_jax.runtime.autodiff.dataflow import dependence
from rrfp_jax.runtime.autodiff.mincut import SINK, SOURCE, UNCUTTABLE, Network
from rrfp_jax.runtime.autodiff.traced import CHEAP, quiet, reduce, with_given
from rrfp_jax.runtime.sizes import nbytes


@dataclass(frozen=True)
class ResidualPlan:
    """Where each residual comes from; see the module's text."""

    whole: ClosedJaxpr
    kept: int
    prepared: Sequence[Var]
    saved: Sequence[Var]
    rebuilt: Sequence[Var]

    def residuals(self, stage_args: Sequence[Any], outputs: Sequence[Any], n_params: int) -> list[Any]:
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
            program = reduce(quiet(with_given(self.whole, produced, len(jaxpr.invars), self.rebuilt)))
            known.update(zip(self.rebuilt, program(*(known[names[i]] for i in program.reads)), strict=True))
        return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars[self.kept :]]


def plan_residuals(whole: ClosedJaxpr, n_params: int, kept: int) -> ResidualPlan:
    """Save the fewest bytes from which all that is wanted, and can be had no other way, follows cheaply."""
    jaxpr, masks = whole.jaxpr, dependence(whole)
    weights = (1 << n_params) - 1
    sent = {v for v in jaxpr.outvars[:kept] if isinstance(v, Var)}
    available = {*jaxpr.invars, *jaxpr.constvars, *sent}
    wanted = dict.fromkeys(v for v in jaxpr.outvars[kept:] if isinstance(v, Var) and v not in available)
    prepared = [v for v in wanted if masks[v] and not masks[v] & ~weights]
    available.update(prepared)
    for equation in jaxpr.eqns:
        read = [v for v in equation.invars if not isinstance(v, Literal)]
        cheap = equation.primitive.name in CHEAP or not any(masks[v] for v in read)
        if cheap and available.issuperset(read):
            available.update(equation.outvars)
    chosen = _fewest_bytes([v for v in wanted if v not in available], jaxpr.eqns, available)
    prepared += [v for v in chosen if masks[v] and not masks[v] & ~weights]
    saved = [v for e in jaxpr.eqns for v in e.outvars if v in chosen and v not in prepared]
    rebuilt = [v for v in wanted if v not in {*saved, *prepared}]
    return ResidualPlan(whole, kept, prepared, saved, rebuilt)


def _fewest_bytes(wanted: Sequence[Var], equations: Sequence[JaxprEqn], available: Set[Any]) -> list[Any]:
    """The values to be saved so that the wanted ones follow from them, and what is available, cheaply.

    By a minimum cut: node ("has", v) is on the sink's side if the backward has v, ("makes", v) if it computes
    v itself, by cheap arithmetic on what it has.
    """
    producers = {v: equation for equation in equations for v in equation.outvars}
    network = Network()
    for v in wanted:
        network.edge(("has", v), SINK)
    pending, placed = list(wanted), dict[Any, None]()
    while pending:
        v = pending.pop()
        if v in placed:
            continue
        placed[v] = None
        network.edge(("makes", v), ("has", v), UNCUTTABLE if is_key(v.aval) else nbytes(v.aval))
        if producers[v].primitive.name not in CHEAP:
            network.edge(SOURCE, ("makes", v))
            continue
        for u in producers[v].invars:
            if not isinstance(u, Literal) and u not in available:
                network.edge(("has", u), ("makes", v))
                pending.append(u)
    backward = network.sink_side()
    return [v for v in placed if ("has", v) in backward and ("makes", v) not in backward]
