"""What a step that ran would have taken if one thing had been different: its own costs, replayed by the core.

The replay of the step as it was says how far to trust the others: see `WhatIfs.error`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rrfp_jax.core.measure.metrics import peak_charge, peak_in_flight
from rrfp_jax.core.measure.recorded_step import RecordedStep
from rrfp_jax.core.measure.replayed import Place, replay_of
from rrfp_jax.core.measure.trace import StepTrace
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.recut import Layers
from rrfp_jax.sim.variants import FEW_SCHEDULES, SCHEDULES, SLOWEST, Variant, variants

TRUSTED_ERROR = 0.05
"""Above this error of the replay nothing is predicted, as in ByteDance's SMon (arXiv:2505.05713)."""

LIMITED = ("schedule", "split")
"""Kinds of changes by which a step may not fit into its limits."""

MANY_TASKS = 8_000
"""Of a step with more than these less is tried, so that it takes some seconds."""


@dataclass(frozen=True)
class WhatIf:
    """One thing that could be different.

    Attributes:
        change, kind, subject: see `Variant`.
        seconds: what the step would take.
    """

    change: str
    kind: str
    subject: Hashable
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WhatIfs:
    """What the step would have taken.

    Attributes:
        measured: what it took (s).
        replayed: what the simulator says that it took (s); what is saved is counted from here.
        changes: the one that saves most first.
    """

    measured: float
    replayed: float
    changes: Sequence[WhatIf]

    @property
    def error(self) -> float:
        """How far the simulator is off on the step as it was, as a share of what that took."""
        return abs(self.replayed - self.measured) / self.measured if self.measured else 0.0

    def saved(self, change: WhatIf) -> float:
        """The share of the step that a change saves; negative if it costs."""
        return 1.0 - change.seconds / self.replayed if self.replayed else 0.0


def what_ifs(
    step: RecordedStep, schedules: Sequence[str] | None = None, layers: Layers | None = None
) -> WhatIfs:
    """Replay a step as it was, and with one thing changed at a time.

    Args:
        step: with a backward.
        schedules: by name, to try instead of its own; those that would hold more are left out. None for
            `SCHEDULES`, of a large step `FEW_SCHEDULES`.
        layers: what they take, found from this step and others; see `variants`.
    """
    as_recorded = replay_of(step.trace)
    costs, leads = as_recorded.costs, as_recorded.leads
    many = len(step.trace.records) > MANY_TASKS
    if schedules is None:
        schedules = FEW_SCHEDULES if many else SCHEDULES
    found = []
    for variant in variants(step, costs, schedules, layers, slowest=1 if many else SLOWEST):
        try:
            trace = _replay(variant, {} if variant.kind == "host" else leads)
        except (ValueError, RuntimeError):
            if variant.kind not in LIMITED:  # which may not be able to run within the step's limits
                raise
            continue
        if variant.kind != "schedule" or _fits(trace, step):
            found.append(WhatIf(variant.change, variant.kind, variant.subject, trace.makespan))
    found.sort(key=lambda change: change.seconds)
    as_it_was = _replay(Variant("as it was", "none", None, costs, step), leads)
    return WhatIfs(measured=step.trace.makespan, replayed=as_it_was.makespan, changes=found)


def _replay(variant: Variant, leads: Mapping[Place, float]) -> StepTrace:
    step = variant.step
    return simulate(step.rules, variant.costs, budgets=step.budgets, lead=step.lead, leads=leads)


def _fits(trace: StepTrace, step: RecordedStep) -> bool:
    """Whether another schedule holds no more than the step's might; no limit stops a fixed order."""
    rules = step.rules
    if step.fixed_order:
        most = max(peak_in_flight(step.trace))
    else:
        most = rules.microbatches if rules.admission_limit is None else rules.admission_limit
    if max(peak_in_flight(trace)) > most:
        return False
    return all(
        budget is None or peak_charge(trace.order(stage), budget.costs) <= budget.limit
        for stage, budget in enumerate(step.budgets or ())
    )
