"""The parts of a run's page, from what matters most to single tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.core.tasks import KINDS
from rrfp_jax.report import charts
from rrfp_jax.report.charts import MOST_MEDIANS, Plot, heatmap, history, lengths, links, slowest, tightest
from rrfp_jax.report.explanation import Explanation
from rrfp_jax.report.run_folder import Run
from rrfp_jax.report.step_charts import drawn_stages, memory, timeline
from rrfp_jax.report.step_charts import said as said_of_memory
from rrfp_jax.report.tails import tails
from rrfp_jax.trace.records import RecordedStep

MOST_TAILS = 40
"""Rows of the table; of more stages and kinds those that exceed their medians most."""


class Section(NamedTuple):
    """A part of a page: a title, a note below it, and a chart or a table if there is something to show."""

    title: str
    note: str
    plot: Plot | None = None
    table: Sequence[Sequence[str]] = ()


def sections_of(run: Run, explanation: Explanation) -> list[Section]:
    """All of them."""
    last, traces = run.steps[-1].recorded, [step.recorded.trace for step in run.steps]
    span = last.trace.makespan
    found = [
        Section(
            "Where the time went",
            "All stages of all steps shown, and what was beside their tasks.",
            charts.shares({run.name: explanation.shares}),
        ),
        Section(
            "What if",
            f"{WHAT_IF} {explanation.trust}",
            charts.savings(explanation) if explanation.savings else None,
        ),
        Section(title_of(last), timeline_note(last), timeline(last, span)),
        Section("How each stage spent it", "The same colours as above.", charts.stages(last, span)),
        Section("Who is slower than the others", f"{slowest(traces)} {HEAT}", heatmap(traces)),
        Section("Memory", f"{said_of_memory(last)} {_measured(run)}", memory(last)),
        _lengths([step.recorded for step in run.steps]),
    ]
    if last.trace.stages > 1:
        found += [Section("Links", f"{tightest(traces)} {LINKS}", links(traces))]
    if len(run.history) > 1:
        found += [Section("All steps", HISTORY, history({run.name: run.history}))]
    return [*found, _tails(run)]


WHAT_IF = "The same steps in virtual time, with one thing changed."
HEAT = (
    "A hot spot is a slow worker, a stripe an uneven stage, a column a step of much data; scatter is "
    "lengths. Injected delays count."
)
LINKS = "Slack is how long after its arrival the stage begins with a message."
HISTORY = (
    "Dashed lines are changes of schedule or learning rate, restarts, and updates that were left out. What "
    f"took more than {MOST_MEDIANS:.0f} times the median is drawn at the edge."
)


def title_of(step: RecordedStep) -> str:
    """Step and, if there are several, replica."""
    replica = f", replica {step.trace.replica}" if step.trace.busy_by_replica else ""
    return f"Step {step.trace.step}{replica}"


def timeline_note(step: RecordedStep) -> str:
    """How to read it."""
    drawn, all_of = drawn_stages(step), step.trace.stages
    some = "" if len(drawn) == all_of else f"{len(drawn)} of its {all_of} stages, the busiest among them. "
    several = (
        f"The replica that ended last, of {len(step.trace.busy_by_replica)}. "
        if step.trace.busy_by_replica
        else ""
    )
    return (
        f"{several}{some}Scroll to zoom, drag to move, hover for details. Black outlines are the critical "
        "path: the chain of tasks that made the step as long as it was."
    )


def _lengths(steps: Sequence[RecordedStep]) -> Section:
    if len({bucket for step in steps for bucket in step.buckets}) == 1:
        return Section("Lengths", "All microbatches have the same shapes.")
    note = "What tasks of each shape took, without injected delays: the median, and where nine of ten are."
    return Section("Lengths", note, lengths(steps))


def _measured(run: Run) -> str:
    """What the ledger has counted in the last step: with messages and what programs need while they run."""
    line = run.history[-1] if run.history else None
    if line is None or not line.peak_bytes:
        return ""
    known = [
        (peak / budget, stage, peak, budget)
        for stage, (peak, budget) in enumerate(zip(line.peak_bytes, line.budget_bytes, strict=False))
        if budget
    ]
    if known:
        _, stage, peak, budget = max(known)
        most = f"stage {stage} was closest to its budget, {_mib(peak)} of {_mib(budget)}"
    else:
        peak, stage = max((peak, stage) for stage, peak in enumerate(line.peak_bytes))
        most = f"stage {stage} held most, {_mib(peak)}"
    return f"With messages, and what programs need while they run, {most} (peak_bytes of the last step)."


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _tails(run: Run) -> Section:
    found = tails([step.recorded.trace for step in run.steps])
    note = "Of each stage and kind of task, in ms, without injected delays."
    if len(found) > MOST_TAILS:
        found = sorted(found, key=lambda tail: tail.median - tail.p95)[:MOST_TAILS]
        note += f" The {MOST_TAILS} whose 95th percentile exceeds the median most."
    delayed = any(tail.delayed for tail in found)
    head = ["stage", "kind", "median", "p95", "worst", "longest: microbatch (step)"]
    rows = [head + ["injected delays"] * delayed]
    for tail in found:
        figures = [f"{own * 1e3:.2f}" for own in (tail.median, tail.p95, tail.worst)]
        late = ", ".join(f"{microbatch} ({step})" for step, microbatch in tail.late)
        injected = [f"{tail.delayed} tasks, {tail.injected * 1e3:.1f}"] * delayed
        rows.append([str(tail.stage), KINDS[tail.kind].title, *figures, late, *injected])
    return Section("Tails", note, table=rows)
