"""A small step: its rules, its tasks as messages name them, and traces written by hand or simulated."""

from rrfp_jax.core import events
from rrfp_jax.core.hints import BF
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.families import FAMILIES
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.records import Part, StepTrace, TaskRecord


def rules(stages=2, microbatches=3, schedule=None, chunks=1, **kwargs):
    return StepRules(
        placement=Placement(stages, chunks), microbatches=microbatches, schedule=schedule or BF(), **kwargs
    )


def F(j, chunk=0):
    return Task(FORWARD, chunk, j)


def B(j, chunk=0):
    return Task(BACKWARD, chunk, j)


def record(task, ready, dispatched, start, end, stage=0):
    return TaskRecord(stage, task, 0, ready, dispatched, start, end)


def trace_of(*records, stages=1, chunks=1):
    return StepTrace(0, Placement(stages, chunks), [Part.of(records)])


def all_foreseen(trace):
    """The same step, with every task dispatched at its start, whenever its input came."""

    def foreseen(record):
        sender = trace.sender(record)
        ready = trace.start if sender is None or sender.stage == record.stage else record.ready
        return record._replace(dispatched=trace.start, ready=ready)

    return StepTrace(0, trace.placement, [Part.of(list(map(foreseen, trace.records)))])


def simulated(name, family):
    """A step of a family under a schedule, the step, and whether the schedule is a fixed order."""
    step, schedule = FAMILIES[family](4, 8, seed=3), by_name(name)
    placement = schedule.placement_for(4)
    rules = StepRules(placement=placement, microbatches=8, schedule=schedule, limit=5)
    fixed = isinstance(schedule, FixedOrder)
    return simulate(rules, WorkloadCosts(step.actual, placement)), step, fixed


class Dispatch(events.Dispatch):
    """What a dispatch is compared with, whatever that makes ready, as this follows from the rest."""

    def __eq__(self, other):
        return isinstance(other, events.Dispatch) and self[:2] == other[:2]

    __hash__ = events.Dispatch.__hash__
