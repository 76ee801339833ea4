"""The documentation's picture of a report, of steps in virtual time.

    python -m tests.support.report_pictures

It is taken by a real browser; its figures are the same on every machine.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Task
from rrfp_jax.report.explanation import TimedStep, explain
from rrfp_jax.report.page import page
from rrfp_jax.report.run_folder import Run
from rrfp_jax.report.store import StepLine
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.disturbances import Disturbed
from rrfp_jax.trace.costs import WorkloadCosts, constant
from rrfp_jax.trace.records import RecordedStep
from tests.support.browser import browser
from tests.support.spoilt import Straggler

IMAGES = Path(__file__).parents[2] / "docs" / "images"

STAGES, MICROBATCHES, STEPS, TRACED = 8, 32, 60, 6
LENGTHS = (256, 512, 1024)
SLOW_STAGE, SLOWER = 3, 1.4
"""Of the second replica."""


@dataclass(frozen=True)
class ByLength(Disturbed):
    """Tasks take as long as their microbatch, whose length the step's number draws."""

    step: int

    def duration(self, stage: int, task: Task) -> float:
        """See `StepCosts.duration`."""
        return self.inner.duration(stage, task) * length(self.step, task.microbatch) / 512


def length(step: int, microbatch: int) -> int:
    """In tokens."""
    return random.Random(1000 * step + microbatch).choice(LENGTHS)


def step_of(schedule: str, number: int) -> TimedStep:
    """A step of two replicas, of which the slower one is kept."""
    hint = by_name(schedule)
    placement = hint.placement_for(STAGES)
    limited = schedule == "bf"
    rules = StepRules(placement=placement, microbatches=MICROBATCHES, schedule=hint, limit=None)
    costs = ByLength(WorkloadCosts(constant(STAGES, MICROBATCHES, 8e-3, transfer=2e-3), placement), number)
    sizes = [[length(number, j) << 14 for j in range(MICROBATCHES)]]
    budgets = [Budget(sizes, 8 * 1024 << 14)] * STAGES if limited else None
    even, slow = (
        simulate(rules, own, budgets=budgets)
        for own in (costs, Straggler(costs, stage=SLOW_STAGE, factor=SLOWER))
    )
    busy = [[trace.busy(stage) for stage in range(STAGES)] for trace in (even, slow)]
    trace = replace(slow, step=number, replica=1, busy_by_replica=busy)
    names = [f"tokens int32[1,{length(number, j)}]" for j in range(MICROBATCHES)]
    recorded = RecordedStep(trace=trace, rules=rules, budgets=budgets, buckets=names)
    return TimedStep(recorded=recorded, wall_seconds=1.03 * trace.makespan)


def run_of(schedule: str, before: str = "") -> Run:
    """A run whose first half ran by another schedule, if one is named."""
    lines = []
    for number in range(STEPS):
        name = before if before and number < STEPS // 2 else schedule
        step = step_of(name, number)
        lines.append(StepLine(number, step.wall_seconds, step.recorded.trace.makespan, schedule=name))
    steps = [step_of(schedule, number) for number in range(STEPS - TRACED, STEPS)]
    settings = {"schedule": f'"{schedule}"', "mesh.dp": "2", "mesh.pp": str(STAGES)}
    return Run(name=f"with-{schedule}", steps=steps, history=lines, settings=settings)


def main() -> None:
    """Write it."""
    run = run_of("bf", before="1f1b")
    pages = {"report.png": page(run, explain(run.steps))}
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as chromium:
        for name, html in pages.items():
            file = Path(folder) / "page.html"
            file.write_text(html, encoding="utf-8")
            chromium.open(file)
            assert chromium.until("document.body && document.body.dataset.drawn") == "all"
            chromium.picture(IMAGES / name)
            print(IMAGES / name)


if __name__ == "__main__":
    main()
