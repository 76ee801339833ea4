"""Steps in virtual time: spoilt in one known way, with a slow stage, or large."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.disturbances import Disturbed, Jittered
from rrfp_jax.trace.costs import WorkloadCosts, constant, log_normal
from rrfp_jax.trace.jitter import LEVELS
from rrfp_jax.trace.records import RecordedStep


@dataclass(frozen=True)
class Straggler(Disturbed):
    """One stage takes `factor` times as long, from microbatch `first` to `last` (None: to the end)."""

    stage: int
    factor: float
    first: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.factor < math.inf:
            raise ValueError(
                f"factor={self.factor}: give a multiple of the usual time, finite and at least 0"
            )

    def duration(self, stage: int, task: Task) -> float:
        seconds = self.inner.duration(stage, task)
        last = task.microbatch if self.last is None else self.last
        slow = stage == self.stage and self.first <= task.microbatch <= last
        return seconds * self.factor if slow else seconds


STAGES, MICROBATCHES = 4, 12
EVEN = constant(STAGES, MICROBATCHES, 10e-3, transfer=1e-3)


def rules(name="bf", limit=4, microbatches=MICROBATCHES):
    schedule = by_name(name)
    placement = schedule.placement_for(STAGES)
    return StepRules(placement=placement, microbatches=microbatches, schedule=schedule, limit=limit)


def ran(costs, name="bf", budgets=None, buckets=None, **kind):
    own = rules(name, **kind)
    trace = simulate(own, costs, budgets=budgets)
    return RecordedStep(trace=trace, rules=own, budgets=budgets, buckets=buckets or [""] * own.microbatches)


def spoilt(name):
    """A step that something is wrong with, and the seconds of the same step without that."""
    costs = WorkloadCosts(EVEN, rules().placement)
    fine = simulate(rules(), costs).makespan
    if name == "stage":
        return ran(Straggler(costs, stage=2, factor=1.6)), fine
    if name == "jitter":
        return ran(Jittered(costs, LEVELS["J3"], seed=5)), fine
    if name == "lengths":
        uneven = log_normal(STAGES, MICROBATCHES, forward=10e-3, sigma=0.8, shared=1.0, seed=2, transfer=1e-3)
        halves = rows([sum(row) / MICROBATCHES for row in uneven.backward_input])
        forward = rows([sum(row) / MICROBATCHES for row in uneven.forward])
        even = replace(EVEN, forward=forward, backward_input=halves, backward_weight=halves)
        lengths = [str(j) for j in range(MICROBATCHES)]
        return ran(WorkloadCosts(uneven, rules().placement), buckets=lengths), simulate(
            rules(), WorkloadCosts(even, rules().placement)
        ).makespan
    slow = [list(row) for row in EVEN.transfer_forward]
    slow[1] = [40e-3] * MICROBATCHES
    return ran(
        WorkloadCosts(replace(EVEN, transfer_forward=tuple(map(tuple, slow))), rules().placement)
    ), fine


def rows(values):
    return tuple((value,) * MICROBATCHES for value in values)


def large_step(stages: int, microbatches: int) -> RecordedStep:
    """Of microbatches of natural length, by BF."""
    placement = by_name("bf").placement_for(stages)
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=by_name("bf"), limit=stages)
    work = log_normal(stages, microbatches, forward=0.01, sigma=0.3, shared=0.5, seed=1, transfer=1e-3)
    trace = simulate(rules, WorkloadCosts(work, placement))
    return RecordedStep(trace=trace, rules=rules, buckets=[str(j % 4) for j in range(microbatches)])
