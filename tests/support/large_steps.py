"""Steps of many stages and microbatches, in virtual time."""

from __future__ import annotations

from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from rrfp_jax.trace.records import RecordedStep


def large_step(stages: int, microbatches: int) -> RecordedStep:
    """Of microbatches of natural length, by BF."""
    placement = by_name("bf").placement_for(stages)
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=by_name("bf"), limit=stages)
    work = log_normal(stages, microbatches, forward=0.01, sigma=0.3, shared=0.5, seed=1, transfer=1e-3)
    trace = simulate(rules, WorkloadCosts(work, placement))
    return RecordedStep(trace=trace, rules=rules, buckets=[str(j % 4) for j in range(microbatches)])
