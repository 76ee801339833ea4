"""The paper's schedules on a row: 1F1B and ZB with synchronous messages, BF and BFW with asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from benchmarks.studies.paper.published import Row, model
from benchmarks.studies.paper.workloads import Machine, reduce_seconds, workload
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.compare import byte_budgets
from rrfp_jax.sim.disturbances import LateReadiness
from rrfp_jax.sim.engine import Links, simulate
from rrfp_jax.trace.costs import StepCosts, Workload, WorkloadCosts
from rrfp_jax.trace.records import StepTrace, peak_bytes

LIMIT = 32
"""Microbatches in flight under a hint, the paper's default; or as many as there are stages, if that is more.
With half as many, a pipeline of 64 stages (a row that is fitted) took twice as long as the paper's."""


class How(NamedTuple):
    """How a step is run.

    Attributes:
        schedule: by our name.
        links: of its messages.
        limit: microbatches in flight under a hint; None for no limit.
        bytes: that a stage may hold under a hint; None for no limit.
        exchange: seconds that a message takes beside its transfer.
    """

    schedule: str
    links: Links
    limit: int | None = LIMIT
    bytes: int | None = None
    exchange: float = 0.0


def paper(row: Row, machine: Machine) -> dict[str, How]:
    """By the paper's names; ZB as ZB-H1, which has the memory of 1F1B.

    Shapes are agreed on only where they differ, so `Machine.exchange` is that of multimodal rows.
    """
    exchange = machine.exchange if model(row.model).vision else 0.0
    return {
        "1F1B": How("1f1b", "synchronous", exchange=exchange),
        "ZB": How("zb-h1", "synchronous", exchange=exchange),
        "BF": How("bf", "serial", max(LIMIT, row.pp)),
        "BFW": How("bfw", "serial", max(LIMIT, row.pp)),
    }


Change = Callable[[StepCosts], StepCosts]
"""What else happens to a step's costs."""


def run(work: Workload, how: How, change: Change | None = None) -> StepTrace:
    """One step of one replica."""
    schedule = by_name(how.schedule)
    placement = schedule.placement_for(work.stages)
    rules = StepRules(
        placement=placement,
        microbatches=work.microbatches,
        schedule=schedule,
        limit=how.limit,
        accumulation="arrival",
    )
    costs: StepCosts = LateReadiness(WorkloadCosts(work, placement), how.exchange)
    budgets = byte_budgets(work, how.bytes, placement.chunks)
    return simulate(rules, change(costs) if change else costs, links=how.links, budgets=budgets)


def seconds(row: Row, machine: Machine, how: How, seeds: int) -> float:
    """Mean over so many iterations; an iteration lasts as long as its slowest replica."""
    return fmean(
        max(run(workload(row, machine, seed * row.dp + replica), how).makespan for replica in range(row.dp))
        + reduce_seconds(row, machine)
        for seed in range(seeds)
    )


def most_bytes(trace: StepTrace, work: Workload) -> float:
    """That a stage held."""
    assert work.activation_bytes is not None
    return max(peak_bytes(trace, work.activation_bytes))
