"""Schedules side by side: each is simulated on the same steps; its time and memory are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from rrfp_jax.core.admission import Accumulation
from rrfp_jax.core.hints import BF
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.scheduler import check_can_end
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.core.step_rules import Budget, Budgets, StepRules
from rrfp_jax.sim.choice import Auto, Candidate, Choice, choose
from rrfp_jax.sim.engine import Links
from rrfp_jax.sim.planned import EVALUATIONS, plan
from rrfp_jax.studies.bounds import lower_bound
from rrfp_jax.studies.disturbances import Jittered
from rrfp_jax.studies.families import Step
from rrfp_jax.trace.costs import Workload, WorkloadCosts, workload_of
from rrfp_jax.trace.idleness import Cause, shares, stage_times
from rrfp_jax.trace.jitter import Level
from rrfp_jax.trace.records import RecordedStep, StepTrace, peak_bytes, peak_in_flight


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all schedules are given."""

    limit: int | None = None  # of microbatches in flight on a stage under a hint or a plan
    byte_limit: int | None = None  # the same in bytes, for workloads that say what microbatches hold
    as_ran: bool = False  # a step that ran within limits of its own keeps those instead
    chunks: int = 1  # a stage, for schedules that are defined for several; a run's own keeps its placement
    links: Links = "parallel"
    accumulation: Accumulation | None = None  # like `spare_gradients`: None for what a step ran with
    spare_gradients: int | None = None
    evaluations: int = EVALUATIONS  # simulations that a planner may spend on each step
    jitter: Level | None = None  # other delays for each step, the same for all schedules


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One schedule on all steps; times are in seconds."""

    makespans: Sequence[float]
    bounds: Sequence[float]  # what no order on this placement can beat without `Conditions.jitter`, by step
    idle: Sequence[Mapping[str, float]]  # by step, mean shares in which a stage is idle; see `COLUMNS`
    in_flight: int  # most microbatches on a stage, over all steps
    bytes: float | None  # most that a stage held; None for workloads that do not say
    recorded: RecordedStep  # the first step
    chosen: Sequence[str] = ()  # by step, the hint that was chosen, if there was anything to choose

    @property
    def trace(self) -> StepTrace:
        return self.recorded.trace

    @property
    def makespan(self) -> float:
        """Median over the steps (s)."""
        return median(self.makespans)

    @property
    def bubble(self) -> float:
        """Share of the makespan in which a stage does not compute; mean over stages and steps."""
        return fmean(sum(shares.values()) for shares in self.idle)

    @property
    def above_bound(self) -> float:
        """By which part the makespan exceeds the bound; median over the steps."""
        pairs = zip(self.makespans, self.bounds, strict=True)
        return median(span / bound - 1 if bound else 0.0 for span, bound in pairs)

    def speedup_over(self, other: Outcome) -> float:
        """How many times as long the other takes on the same step; median over the steps."""
        pairs = zip(other.makespans, self.makespans, strict=True)
        return median(theirs / ours if ours else 1.0 for theirs, ours in pairs)


def compare(
    schedules: Mapping[str, Schedule | Auto | None], steps: Sequence[Step], given: Conditions
) -> dict[str, Outcome]:
    """Simulate each schedule on each step: None is one planned for it. ValueError names what cannot work."""
    found = {}
    for name, schedule in schedules.items():
        try:
            if isinstance(schedule, FixedOrder):
                check_can_end(_limits(schedule, steps[0], given)[0])
            found[name] = _simulated(schedule, steps, given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _simulated(schedule: Schedule | Auto | None, steps: Sequence[Step], given: Conditions) -> Outcome:
    ran: list[RecordedStep] = []
    chosen: list[str] = []
    for number, step in enumerate(steps):
        if isinstance(schedule, Auto):
            chosen.append(choice(schedule, step, given).name)
            ours = by_name(chosen[-1])
        else:
            known = _candidate(BF(), step, step.known, given)
            ours = schedule or plan(known, evaluations=given.evaluations).order
        own = _candidate(ours, step, step.actual, given)
        if given.jitter is not None:
            own = replace(own, costs=Jittered(own.costs, given.jitter, seed=number))
        buckets = [str(j) for j in range(own.rules.microbatches)]  # each has times of its own
        ran.append(RecordedStep(trace=own.simulated(), rules=own.rules, budgets=own.budgets, buckets=buckets))
    return outcome_of(ran, [step.actual for step in steps], chosen)  # jitter only adds to the costs


def outcome_of(
    ran: Sequence[RecordedStep], workloads: Sequence[Workload] | None = None, chosen: Sequence[str] = ()
) -> Outcome:
    """The outcome of steps, at least one, that have run, or were simulated for these workloads."""
    both = [*zip(ran, workloads or map(workload_of, ran), strict=True)]
    held = [max(peak_bytes(one.trace, of.activation_bytes)) for one, of in both if of.activation_bytes]
    return Outcome(
        makespans=[step.trace.makespan for step in ran],
        bounds=[lower_bound(one.rules, WorkloadCosts(of, one.rules.placement)) for one, of in both],
        idle=[_idle_shares(step) for step in ran],
        in_flight=max(max(peak_in_flight(step.trace)) for step in ran),
        bytes=max(held, default=None),
        recorded=ran[0],
        chosen=chosen,
    )


def choice(auto: Auto, step: Step, given: Conditions) -> Choice:
    """The hint for a step, by what is known of it; ValueError if none can run."""
    return choose({name: _candidate(hint, step, step.known, given) for name, hint in auto.hints.items()})


def _candidate(schedule: Schedule, step: Step, workload: Workload, given: Conditions) -> Candidate:
    """A step with a schedule, by what is known of it or by what happens."""
    rules, budgets = _limits(schedule, step, given)
    costs = WorkloadCosts(workload, rules.placement)
    return Candidate(rules=rules, costs=costs, budgets=budgets, links=given.links)


def _limits(schedule: Schedule, step: Step, given: Conditions) -> tuple[StepRules, Budgets]:
    """The rules of a step, and what each stage may hold in bytes."""
    # A step as it ran, if its limits are wanted; a fixed order that fits into a budget has none.
    ran = step.ran if given.as_ran else None
    own = ran if ran is not None and (ran.rules.limit is not None or any(ran.budgets or ())) else None
    placement = schedule.placement_for(step.actual.stages, given.chunks)
    if step.ran is not None and schedule == step.ran.rules.schedule and given.chunks == 1:
        placement = step.ran.rules.placement
    chunks = placement.chunks
    rules = StepRules(placement=placement, microbatches=step.actual.microbatches, schedule=schedule)
    if step.ran is not None:
        rules = replace(step.ran.rules, placement=placement, schedule=schedule)
    asked = {"accumulation": given.accumulation, "spare_gradients": given.spare_gradients}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    rules = replace(rules, limit=given.limit if own is None else own.rules.limit, **changes)
    if own is None:
        sizes, limit = step.actual.activation_bytes, given.byte_limit
        if rules.hint is not None and limit is not None and sizes and limit < max(map(max, sizes)):
            least = f"a microbatch takes {int(max(map(max, sizes)))} bytes on a stage: give at least that"
            raise ValueError(f"byte_limit={limit}: {least}")
        return rules, byte_budgets(step.actual, limit, chunks)
    if own.budgets is None or own.rules.placement == placement:
        return rules, own.budgets
    return rules, [
        budget and Budget(_in_equal_parts(map(sum, zip(*budget.costs, strict=True)), chunks), budget.limit)
        for budget in own.budgets  # how many microbatches neighbours have room for is not known then
    ]


def byte_budgets(workload: Workload, limit: int | None, chunks: int) -> list[Budget] | None:
    """The limit in bytes for every stage, whose chunks hold equal parts of a microbatch, in whole bytes."""
    if limit is None:
        return None
    if workload.activation_bytes is None:
        raise ValueError(f"a limit of {limit} bytes, but the workload has no activation_bytes")
    return [Budget(_in_equal_parts(row, chunks), limit) for row in workload.activation_bytes]


def _in_equal_parts(sizes: Iterable[float], chunks: int) -> list[list[int]]:
    """Each microbatch's size divided into equal parts, by chunk."""
    return [[int(size / chunks) for size in sizes]] * chunks


COLUMNS: Mapping[str, Sequence[Cause]] = {
    "stall": (Cause.BEGIN, Cause.STAGE, Cause.LINK, Cause.INJECTED, Cause.END),
    "blocked": (Cause.ORDER,),
    "held": (Cause.MEMORY, Cause.TURN),
    "launch": (Cause.ESTIMATE, Cause.GROUP, Cause.HOST),
}
"""The columns that a table of schedules has of idleness, and their causes."""


def _idle_shares(step: RecordedStep) -> dict[str, float]:
    share = shares(stage_times(step.trace, step.fixed_order, step.grouped))
    return {column: sum(share[cause] for cause in causes) for column, causes in COLUMNS.items()}
