"""Traces written by hand, and simulated ones."""

from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.families import FAMILIES
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.records import Part, StepTrace, TaskRecord


def record(task, ready, dispatched, start, end, stage=0):
    return TaskRecord(stage, task, 0, ready, dispatched, start, end)


def trace_of(*records, stages=1, chunks=1):
    return StepTrace(0, Placement(stages, chunks), [Part.of(records)])


def simulated(name, family):
    """A step of a family under a schedule, the step, and whether the schedule is a fixed order."""
    step, schedule = FAMILIES[family](4, 8, seed=3), by_name(name)
    placement = schedule.placement_for(4)
    rules = StepRules(placement=placement, microbatches=8, schedule=schedule, limit=5)
    fixed = isinstance(schedule, FixedOrder)
    return simulate(rules, WorkloadCosts(step.actual, placement)), step, fixed
