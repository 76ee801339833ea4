"""Looks at runs, made by hand."""

from dataclasses import replace
from pathlib import Path

from rrfp_jax.core.hints import BF
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.report.look import Seen, State, read_latest
from rrfp_jax.report.store import LATEST, StepFile, StepLine
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from rrfp_jax.trace.records import RecordedStep

NOW = 1000.0


def told(recorded, replicas=1, wide=1):
    """A step's report; replicas are a tenth slower than the one before them, stages have `wide` ranks."""
    trace, stages = recorded.trace, range(recorded.trace.stages)
    if replicas > 1:
        busy = [[trace.busy(stage) * 1.1 ** (n - replicas + 1) for stage in stages] for n in range(replicas)]
        trace = replace(trace, replica=replicas - 1, busy_by_replica=busy)
    ranks = [list(range(at * wide, (at + 1) * wide)) for at in range(replicas * trace.stages)]
    return replace(recorded, trace=trace, ranks=ranks)


def step_of(stages, microbatches=8):
    """A simulated step of microbatches of natural length."""
    rules = StepRules(placement=Placement(stages), microbatches=microbatches, schedule=BF(), limit=stages)
    work = log_normal(stages, microbatches, forward=0.01, sigma=0.3, shared=0.5, seed=3, transfer=1e-3)
    trace = simulate(rules, WorkloadCosts(work, rules.placement))
    return RecordedStep(trace=trace, rules=rules, buckets=[""] * microbatches)


def latest(folder, report):
    """What is read of a report that was written."""
    StepFile(folder).add(report)
    return read_latest(folder / LATEST)


def line(step=7, **given):
    """A line of `metrics.jsonl` as it is read."""
    known = {"step_seconds": 0.25, "wall_seconds": 0.3, "schedule": "bf", "loss": 2.5 - step / 8}
    known |= {"gradient_norm": 0.75, "tokens_per_second": 12345.0, "load_seconds": 0.0004}
    return StepLine(step=step, **known | given)


def seen(latest=None, **given):
    """A look at a run."""
    known = {"state": State.RUNNING, "steps": 20, "lines": [line(n) for n in range(8)], "told_at": NOW - 1}
    busy = [] if latest is None else [latest.trace.busy_seconds]
    return Seen(folder=Path("runs/mine"), now=NOW, latest=latest, **{"busy": busy} | known | given)
