"""Schedules side by side: each is simulated on the same steps; its time and memory are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeAlias

from rrfp_jax.core.admission import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.hints import BF
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.scheduler import check_can_end
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.bounds import lower_bound
from rrfp_jax.sim.choice import Auto, Candidate, Choice, choose
from rrfp_jax.sim.engine import Links, simulate
from rrfp_jax.sim.families import Step
from rrfp_jax.sim.planned import EVALUATIONS, plan
from rrfp_jax.trace.costs import Costs, Workload, WorkloadCosts, workload_of
from rrfp_jax.trace.idleness import Cause, StageTime, shares, stage_times
from rrfp_jax.trace.records import RecordedStep, StepTrace, peak_bytes, peak_in_flight

Change: TypeAlias = Callable[[Costs, int], Costs]
"""What else a step costs besides its workload, such as jitter, by the step's number; it only adds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all schedules are given.

    Attributes:
        limit: most microbatches in flight on a stage under a hint or a plan; None for no limit.
        byte_limit: the same in bytes, for workloads that say what microbatches hold; None for no limit.
        as_ran: a step that ran within limits of its own keeps those instead.
        chunks: a stage, for schedules that are defined for several.
        links: how transfers share them.
        accumulation, spare_gradients: see `StepRules`.
        evaluations: simulations that a planner may spend on each step.
        change: what else happens to the costs.
    """

    limit: int | None = None
    byte_limit: int | None = None
    as_ran: bool = False
    chunks: int = 1
    links: Links = "parallel"
    accumulation: Accumulation = "index"
    spare_gradients: int = SPARE_GRADIENTS
    evaluations: int = EVALUATIONS
    change: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One schedule on all steps.

    Attributes:
        makespans: of the steps (s).
        bounds: what no order on this placement can beat without `Settings.change`, by step (s).
        idle: mean share of the makespan in which a stage stalls, is blocked, held back, or launches, by step.
        in_flight: most microbatches in flight on a stage, over all steps.
        bytes: most that a stage held, over all steps; None for workloads that do not say.
        recorded: the first step.
        chosen: by step, the hint that was chosen; empty where there was nothing to choose.
    """

    makespans: Sequence[float]
    bounds: Sequence[float]
    idle: Sequence[Mapping[str, float]]
    in_flight: int
    bytes: float | None
    recorded: RecordedStep
    chosen: Sequence[str] = ()

    @property
    def trace(self) -> StepTrace:
        """Of the first step."""
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
    schedules: Mapping[str, Schedule | Auto | None], steps: Sequence[Step], settings: Settings
) -> dict[str, Outcome]:
    """Simulate each schedule on each step.

    Args:
        schedules: by name; `Auto` for a hint chosen anew for each step, by what is known of it; None for an
            order planned so.
        steps: at least one.
        settings: for all.

    Raises:
        ValueError: a schedule or a limit that cannot work; it names the schedule.
    """
    found = {}
    for name, schedule in schedules.items():
        try:
            if isinstance(schedule, FixedOrder):
                check_can_end(_rules(schedule, steps[0], settings))
            found[name] = _outcome(schedule, steps, settings)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _outcome(schedule: Schedule | Auto | None, steps: Sequence[Step], settings: Settings) -> Outcome:
    recorded: list[RecordedStep] = []
    bounds: list[float] = []
    idle: list[Mapping[str, float]] = []
    held: list[float] = []
    chosen: list[str] = []
    for number, step in enumerate(steps):
        if isinstance(schedule, Auto):
            chosen.append(choice(schedule, step, settings).name)
            ours = by_name(chosen[-1])
        else:
            ours = schedule or _planned(step, settings)
        rules = _rules(ours, step, settings)
        budgets = _budgets(step, settings, rules.placement)
        plain = WorkloadCosts(step.actual, rules.placement)
        costs = plain if settings.change is None else settings.change(plain, number)
        trace = simulate(rules, costs, links=settings.links, budgets=budgets)
        buckets = [str(j) for j in range(rules.microbatches)]  # each has times of its own
        recorded.append(RecordedStep(trace=trace, rules=rules, budgets=budgets, buckets=buckets))
        bounds.append(lower_bound(rules, plain, any_split=True))  # changes only add to the costs
        idle.append(_idle_shares(stage_times(trace, isinstance(ours, FixedOrder))))
        if step.actual.activation_bytes is not None:
            held.append(max(peak_bytes(trace, step.actual.activation_bytes)))
    return Outcome(
        makespans=[step.trace.makespan for step in recorded],
        bounds=bounds,
        idle=idle,
        in_flight=max(max(peak_in_flight(step.trace)) for step in recorded),
        bytes=max(held) if held else None,
        recorded=recorded[0],
        chosen=chosen,
    )


def outcome_of(ran: Sequence[RecordedStep]) -> Outcome:
    """Of steps that have run, at least one; nothing is simulated."""
    workloads = [workload_of(step) for step in ran]
    held = [
        max(peak_bytes(step.trace, workload.activation_bytes))
        for step, workload in zip(ran, workloads, strict=True)
        if workload.activation_bytes is not None
    ]
    return Outcome(
        makespans=[step.trace.makespan for step in ran],
        bounds=[
            lower_bound(step.rules, WorkloadCosts(workload, step.rules.placement), any_split=True)
            for step, workload in zip(ran, workloads, strict=True)
        ],
        idle=[_idle_shares(stage_times(step.trace, step.fixed_order, step.grouped)) for step in ran],
        in_flight=max(max(peak_in_flight(step.trace)) for step in ran),
        bytes=max(held) if held else None,
        recorded=ran[0],
    )


def choice(auto: Auto, step: Step, settings: Settings) -> Choice:
    """The hint for a step, by what is known of it.

    Raises:
        ValueError: no candidate can run.
    """
    candidates = {}
    for name, hint in auto.hints.items():
        rules = _rules(hint, step, settings)
        candidates[name] = Candidate(
            rules=rules,
            costs=WorkloadCosts(step.known, rules.placement),
            budgets=_budgets(step, settings, rules.placement),
            links=settings.links,
        )
    return choose(candidates)


def _planned(step: Step, settings: Settings) -> FixedOrder:
    rules = _rules(BF(), step, settings)
    budgets = _budgets(step, settings, rules.placement)
    known = WorkloadCosts(step.known, rules.placement)
    return plan(rules, known, evaluations=settings.evaluations, links=settings.links, budgets=budgets).order


def _rules(schedule: Schedule, step: Step, settings: Settings) -> StepRules:
    own = _limited(step, settings)
    return StepRules(
        placement=schedule.placement_for(step.actual.stages, settings.chunks),
        microbatches=step.actual.microbatches,
        schedule=schedule,
        limit=settings.limit if own is None else own.rules.limit,
        accumulation=settings.accumulation,
        spare_gradients=settings.spare_gradients,
    )


def _limited(step: Step, settings: Settings) -> RecordedStep | None:
    """The step as it ran, if its limits are wanted; a fixed order that fits into a budget has none."""
    ran = step.ran if settings.as_ran else None
    return ran if ran is not None and (ran.rules.limit is not None or any(ran.budgets or ())) else None


def _budgets(step: Step, settings: Settings, placement: Placement) -> Sequence[Budget | None] | None:
    """What each stage may hold in bytes."""
    own = _limited(step, settings)
    if own is None:
        return byte_budgets(step.actual, settings.byte_limit, placement.chunks)
    if own.budgets is None or own.rules.placement == placement:
        return own.budgets
    return [budget and _spread(budget, placement.chunks) for budget in own.budgets]


def _spread(budget: Budget, chunks: int) -> Budget:
    """The same with other chunks; how many microbatches a neighbour has room for is not known of them."""
    return Budget(_in_equal_parts(map(sum, zip(*budget.costs, strict=True)), chunks), budget.limit)


def byte_budgets(workload: Workload, limit: int | None, chunks: int) -> list[Budget] | None:
    """The limit in bytes for every stage, whose chunks hold equal parts of a microbatch, in whole bytes."""
    if limit is None:
        return None
    if workload.activation_bytes is None:
        raise ValueError(f"a limit of {limit} bytes, but the workload has no activation_bytes")
    return [Budget(_in_equal_parts(row, chunks), limit) for row in workload.activation_bytes]


def _in_equal_parts(sizes: Iterable[float], chunks: int) -> list[list[int]]:
    """Of each microbatch, by chunk."""
    return [[int(size / chunks) for size in sizes]] * chunks


COLUMNS: Mapping[str, Sequence[Cause]] = {
    "stall": (Cause.BEGIN, Cause.STAGE, Cause.LINK, Cause.INJECTED, Cause.END),
    "blocked": (Cause.ORDER,),
    "held": (Cause.MEMORY, Cause.TURN),
    "launch": (Cause.GROUP, Cause.HOST),
}
"""The causes of idleness as a table of schedules has them."""


def _idle_shares(times: Sequence[StageTime]) -> dict[str, float]:
    share = shares(times)
    return {column: sum(share[cause] for cause in causes) for column, causes in COLUMNS.items()}
