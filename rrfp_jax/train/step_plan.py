"""The order of a step under `Planned`, found before it begins, the same on all processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from rrfp_jax.core.step_rules import Bucket, StepRules, bucket_name
from rrfp_jax.core.tasks import Placement
from rrfp_jax.data.contract import Microbatch
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.stages.step import Sums
from rrfp_jax.sim.planned import Planned
from rrfp_jax.trace.costs import CostTable, WorkloadCosts, measured
from rrfp_jax.trace.records import RecordedStep


@dataclass(frozen=True)
class PlannedStep:
    """A step whose order has been found.

    Attributes:
        rules: of the step, with the order.
        predicted_seconds: how long the step takes if costs are as they are known.
        planning_seconds: that finding the order took.
    """

    rules: StepRules
    predicted_seconds: float
    planning_seconds: float


@dataclass(frozen=True)
class Ran:
    """A step whose tasks have all run, with the hash of its plan; `ahead` if its order was planned."""

    plan: Sequence[Microbatch]
    plan_hash: str
    sums: Sums
    ahead: PlannedStep | None


def plan_ahead(
    planned: Planned,
    step: int,
    rules: StepRules,
    buckets: Sequence[Bucket],
    earlier: Iterable[RecordedStep],
    engine: Engine,
) -> PlannedStep | None:
    """The order for a step; None if there are no costs yet for one of its buckets.

    Nothing here depends on the process: records of earlier steps were gathered by all of them. They compare
    what they find.

    Args:
        planned: whose order it is.
        step: its number, for messages.
        rules: of the step, as under the base of `planned`.
        buckets: of each microbatch.
        earlier: steps that have run.
        engine: that will run the step, for its budgets in bytes.

    Raises:
        UsageError: the given costs lack a bucket.
    """
    began = perf_counter()
    names = [bucket_name(bucket) for bucket in buckets]
    table = planned.costs
    if not isinstance(table, CostTable):
        assert table is None, "files have been read"
        table = measured(earlier)
        if table is None or not table.buckets.keys() >= set(names):
            return None
    engine.prepare(buckets, rules)  # the budgets follow from the programs
    budgets = engine.memory.of_step(replace(rules, schedule=planned.hint), buckets).budgets
    try:
        costs = WorkloadCosts(table.workload(names), rules.placement)
        found = planned.plan(rules, costs, budgets)
    except ValueError as error:
        raise UsageError(f"planned orders: {error}") from None
    order = replace(rules, schedule=found.order)
    engine.world.agree(f"the planned order of step {step}", str(order.schedule))
    return PlannedStep(order, found.makespan, perf_counter() - began)


def check_costs(planned: Planned, placement: Placement, buckets: Iterable[Bucket]) -> None:
    """Refuse given costs that lack one of these buckets, or are for another number of stages.

    Raises:
        UsageError: naming it.
    """
    if isinstance(planned.costs, CostTable):
        try:
            WorkloadCosts(planned.costs.workload([bucket_name(bucket) for bucket in buckets]), placement)
        except ValueError as error:
            raise UsageError(f"planned orders: {error}") from None
