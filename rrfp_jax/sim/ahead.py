"""`Planned`: every step has a fixed order of its own, the best that the simulator finds before it begins."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import NoneType

from rrfp_jax.core.hints import BF, Hint
from rrfp_jax.core.measure.cost_table import CostTable
from rrfp_jax.core.measure.costs import Costs
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.ranked import Ranked
from rrfp_jax.core.schedules import NAMED, Schedule
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.sim.planned import EVALUATIONS, Plan, plan

MOST_EVALUATIONS = 1_000_000
"""Simulations for one step: hours of them."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best fixed order that the simulator finds for what a step's tasks take, followed strictly.

    It is found on every process before each step, by a number of simulations and not by a time, so that it is
    the same everywhere. It keeps to the step's limits in flight, by count and in bytes, as a hint does.

    Attributes:
        costs: what tasks and transfers take by bucket, or the JSON file with it (`docs/simulator.md`); None
            for the medians of the run's own latest steps.
        base: what is followed in forward-only passes, and in steps with a bucket that has not been measured
            yet. Plans split the backwards that it splits, and no others.
        evaluations: simulations that a plan may take; those of the first candidates are made in any case.

    Raises:
        ValueError: a field of another type, or `evaluations` below 0.
    """

    costs: CostTable | str | None = None
    base: Schedule = field(default_factory=BF)
    evaluations: int = EVALUATIONS

    def __post_init__(self) -> None:
        number = self.evaluations
        if (
            not isinstance(number, Integral)
            or isinstance(number, bool)
            or not 0 <= number <= MOST_EVALUATIONS
        ):
            raise ValueError(
                f"evaluations={number!r}: give a number of simulations, from 0 to {MOST_EVALUATIONS:,}"
            )
        if not isinstance(self.base, (Hint, FixedOrder)):
            raise ValueError(f"base={self.base!r}: give a schedule, such as BF()")
        if not isinstance(self.costs, (CostTable, str, NoneType)):
            raise ValueError(f"costs={self.costs!r}: give the name of a file, or None for measured ones")

    @property
    def hint(self) -> Hint:
        """The base as a hint: what it ranks first, within the limits."""
        return self.base if isinstance(self.base, Hint) else Ranked(self.base)

    def plan(self, rules: StepRules, costs: Costs, budgets: Sequence[Budget | None] | None = None) -> Plan:
        """The order for a step.

        Args:
            rules: of the step; their own schedule does not matter.
            costs: of its tasks and transfers.
            budgets: in bytes, per stage.
        """
        candidates: dict[str, Schedule] = {} if self.hint in NAMED.values() else {"base": self.hint}
        for name, schedule in NAMED.items():
            if isinstance(schedule, FixedOrder):
                candidates[name] = _SplitAlike(schedule, self.hint)
            elif _splits(schedule, rules) == _splits(self.hint, rules):
                candidates[name] = schedule
        return plan(rules, costs, candidates=candidates, evaluations=self.evaluations, budgets=budgets)


def base_of(schedule: Schedule | Planned) -> Schedule:
    """A schedule itself; of planned orders, what is followed where there are none."""
    return schedule.base if isinstance(schedule, Planned) else schedule


@dataclass(frozen=True)
class _SplitAlike(FixedOrder):
    """A fixed order in which those backwards are split that another schedule splits."""

    inner: FixedOrder
    hint: Hint

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """W follows I at once where a B is taken apart; B is where I was where they are joined."""
        split = self.hint.split(stage, placement, microbatches)
        return [
            own
            for task in self.inner.order(stage, placement, microbatches)
            for own in _spelled(task, (task.chunk, task.microbatch) in split)
        ]


def _spelled(task: Task, split: bool) -> Sequence[Task]:
    if split and task.kind is BACKWARD:
        return task._replace(kind=INPUT), task._replace(kind=WEIGHT)
    if not split and task.kind is INPUT:
        return (task._replace(kind=BACKWARD),)
    return () if not split and task.kind is WEIGHT else (task,)


def _splits(hint: Hint, rules: StepRules) -> list[Collection[tuple[int, int]]]:
    stages = range(rules.placement.stages)
    return [set(hint.split(stage, rules.placement, rules.microbatches)) for stage in stages]
