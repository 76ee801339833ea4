"""What a backward reads from its forward, and where it gets that from.

`jax.vjp` of a stage gives residuals: what the backward reads from the forward. If they were returned as they
are, every microbatch in flight would hold a copy of the weights and of everything made from weights alone
(casts to bf16, reshapes). Here each residual is traced back to where it comes from:

    an input of the stage      kept by the runtime anyway: passed again, not copied
    weights alone              computed once a step by `prepare`, read by every forward and backward
    nothing (tables, masks)    computed again where it is needed
    cheap arithmetic on what   computed again: XLA fuses it into its user, which costs less than
    is there already           writing and reading it
    anything else              saved by the forward, once, even if it is used twice or sent on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Var

from rrfp_jax.runtime.autodiff.dataflow import dependence
from rrfp_jax.runtime.autodiff.traced import CHEAP, quiet, reduce, with_given


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
    return ResidualPlan(whole, kept, prepared, saved, rebuilt)
