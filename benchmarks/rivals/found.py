"""What is told of runs, the same for everybody. Needs neither JAX nor PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts
from rrfp_jax.trace.records import StepTrace, peak_bytes


class Found(NamedTuple):
    """What some steps of one schedule took.

    Attributes:
        step: from the start of its first task to the end of its last one, over all stages; median (s).
        order: what the tasks of the last step take in the order in which they ran, if messages and whoever
            handles them take no time (s). What is beyond that, is theirs.
        held: most microbatches that a stage held, a chunk counting as its part of one.
    """

    step: float
    order: float
    held: float


def found_in(traces: Sequence[StepTrace], workload: Workload) -> Found:
    """The figures of some steps whose tasks take what a workload says."""
    whole = ((1.0,) * workload.microbatches,) * workload.stages
    held = max(max(peak_bytes(trace, whole)) for trace in traces)
    return Found(median(trace.makespan for trace in traces), _order_alone(traces[-1], workload), held)


def _order_alone(trace: StepTrace, workload: Workload) -> float:
    ran = tuple(tuple(trace.order(stage)) for stage in range(trace.stages))
    order = ListedOrder(trace.placement, workload.microbatches, ran)
    rules = StepRules(
        placement=trace.placement,
        microbatches=workload.microbatches,
        schedule=order,
        accumulation="arrival",  # whatever was added when, it is in the order already
    )
    return simulate(rules, WorkloadCosts(workload, trace.placement)).makespan
