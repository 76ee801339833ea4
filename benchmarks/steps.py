"""Simulated steps for studies: one way to run them, and the kinds of steps that are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rrfp_jax.core.hints import BF
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.choice import Candidate
from rrfp_jax.sim.engine import Links, simulate
from rrfp_jax.sim.planned import Plan, plan
from rrfp_jax.studies.compare import byte_budgets
from rrfp_jax.studies.families import FAMILIES, FORWARD_SECONDS, Step, varied
from rrfp_jax.trace.costs import StepCosts, Workload, WorkloadCosts
from rrfp_jax.trace.records import StepTrace, peak_bytes

Figures = tuple[float, float]
"""Makespan (s), and bytes on the fullest stage, in the end over those of 1F1B."""


def simulated(
    schedule: str | Schedule,
    workload: Workload,
    *,
    most: int | None = None,
    links: Links = "parallel",
    lead: float = 0.0,
    change: Callable[[StepCosts], StepCosts] | None = None,
    **rules: Any,
) -> StepTrace:
    own = by_name(schedule) if isinstance(schedule, str) else schedule
    placement = own.placement_for(workload.stages)
    costs: StepCosts = WorkloadCosts(workload, placement)
    return simulate(
        StepRules(placement=placement, microbatches=workload.microbatches, schedule=own, **rules),
        change(costs) if change else costs,
        budgets=byte_budgets(workload, most, placement.chunks),
        links=links,
        lead=lead,
    )


def plan_within(step: Step, limit: int, placement: Placement, evaluations: int) -> Plan:
    """The order that is found by simulating what is known of a step, within so many bytes a stage."""
    rules = StepRules(placement=placement, microbatches=step.known.microbatches, schedule=BF())
    budgets = byte_budgets(step.known, limit, placement.chunks)
    costs = WorkloadCosts(step.known, placement)
    return plan(Candidate(rules=rules, costs=costs, budgets=budgets), evaluations=evaluations)


def figures_of(schedule: str | Schedule, step: Step, limit: int | None = None) -> Figures:
    """What a schedule takes and holds in a step, at most so many bytes under a hint."""
    trace = simulated(schedule, step.actual, most=limit)
    return trace.makespan, held_bytes(trace, step.actual)


def held_bytes(trace: StepTrace, workload: Workload) -> float:
    assert workload.activation_bytes is not None
    return max(peak_bytes(trace, workload.activation_bytes))


def held_microbatches(trace: StepTrace) -> float:
    """Most that a stage held, a chunk counting as its part of one."""
    count = 1 + max(record.task.microbatch for record in trace.records)
    return max(peak_bytes(trace, ((1.0,) * count,) * trace.stages))


@dataclass(frozen=True)
class Cell:
    """What is simulated; transfers in forwards, `per_stage` microbatches per stage."""

    changed: str
    stages: int = 8
    per_stage: int = 4
    sigma: float = 0.3
    transfer: float = 0.1
    family: str | None = None

    @property
    def microbatches(self) -> int:
        return self.stages * self.per_stage

    def step(self, seed: int) -> Step:
        if self.family is not None:
            return FAMILIES[self.family](self.stages, self.microbatches, seed)
        transfer = self.transfer * FORWARD_SECONDS
        return varied(self.stages, self.microbatches, seed, sigma=self.sigma, transfer=transfer)


CELLS = (
    Cell("base"),
    *(Cell(f"{n} stages", stages=n) for n in (4, 16, 32, 64)),
    *(Cell(f"{n} a stage", per_stage=n) for n in (1, 2, 8)),
    *(Cell(f"sd {sigma:g}", sigma=sigma) for sigma in (0.0, 0.15, 0.45, 0.6)),
    *(Cell(f"transfers {part:g}", transfer=part) for part in (0.0, 0.3, 1.0)),
    *(Cell(name, family=name) for name in FAMILIES if name not in ("constant", "log-normal")),
)
"""The kinds of steps that studies simulate: one is the base, each of the others changes one thing."""
