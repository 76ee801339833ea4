"""A step, stage by time, that can be zoomed: every task, every idle time and why, the critical path."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from rrfp_jax.core.tasks import KINDS
from rrfp_jax.explain.charts import WIDTH, Plot, Row, colours, milliseconds, row_height, thinned
from rrfp_jax.explain.sentence import MEANING
from rrfp_jax.trace.idleness import critical_path, idleness
from rrfp_jax.trace.records import RecordedStep, TaskRecord
from rrfp_jax.views.picture import DELAY, DELAY_COLOUR

LEAST_IDLE = 1e-3
"""Part of the step below which an idle time is left out."""


MOST_TASKS = 40_000
"""That are drawn; of a larger step some stages are left out."""


def drawn_stages(step: RecordedStep) -> list[int]:
    """All stages, or so many of a large step that its picture is still fast: some of every part of it.

    The first, the last and the one that is busy longest are always among them.
    """
    trace = step.trace
    most = MOST_TASKS * trace.stages // max(1, len(trace.records))
    if most >= trace.stages:
        return list(range(trace.stages))
    spread = max(most - 1, 2)  # beside the busiest one
    even = {i * (trace.stages - 1) // (spread - 1) for i in range(spread)}
    return sorted(even | {max(range(trace.stages), key=trace.busy)})


def timeline(step: RecordedStep, longest: float) -> Plot:
    """The step. Its rows have short names, since there are many: stage, from, to, kind, task, ready, input.

    Args:
        step: that ran.
        longest: where the axis ends (s).
    """
    stages = drawn_stages(step)
    records = [record for stage in stages for record in step.trace.stage_records(stage)]
    x = alt.X("a:Q", title="ms", scale=alt.Scale(domain=[0, milliseconds(longest)]))
    y = alt.Y("s:O", title="stage", axis=thinned())
    present = {record.task.kind for record in records}
    drawn = {KINDS[kind].title: KINDS[kind].colour for kind in sorted(present)}
    delays = _delays(step, records)
    scale = colours(drawn | ({DELAY: DELAY_COLOUR} if delays else {}))
    legend = alt.Legend(title=None, orient="bottom")
    times = [_tip("a", "from"), _tip("b", "to")]
    idle = (
        alt.Chart(alt.NamedData("idle"))
        .mark_rect(color="#eeeeee")
        .encode(x=x, x2="b:Q", y=y, tooltip=[_tip("k", "why"), _tip("t", "waits for"), *times])
    )
    colour = alt.Color("k:N", scale=scale, legend=legend)
    said = [_tip("t", "task"), _tip("k", "kind"), *times]
    tasks = (
        alt.Chart(alt.NamedData("tasks"))
        .mark_rect()
        .encode(x=x, x2="b:Q", y=y, color=colour, tooltip=[*said, _tip("r", "ready"), _tip("n", "input")])
    )
    injected = (
        alt.Chart(alt.NamedData("delays")).mark_rect().encode(x=x, x2="b:Q", y=y, color=colour, tooltip=said)
    )
    critical = (
        alt.Chart(alt.NamedData("critical"))
        .mark_rect(fillOpacity=0, stroke="black", strokeWidth=1.2)
        .encode(x=x, x2="b:Q", y=y)
    )
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    height = alt.Step(row_height(len(stages)))
    chart = alt.layer(idle, tasks.add_params(zoom), injected, critical)
    rows = {"tasks": _tasks(step, records), "delays": delays}
    shown = set(stages)
    for name, found in (("idle", _idle(step)), ("critical", _critical(step))):
        rows[name] = [row for row in found if row["s"] in shown]
    return Plot(chart.properties(width=WIDTH, height=height), rows)


def _tasks(step: RecordedStep, records: Sequence[TaskRecord]) -> list[Row]:
    begin = step.trace.start
    return [
        {
            "s": record.stage,
            "a": milliseconds(record.start - begin),
            "b": milliseconds(record.end - begin),
            "k": KINDS[record.task.kind].title,
            "t": str(record.task),
            "r": milliseconds(record.ready - begin),
            "n": _transfer(step, record),
        }
        for record in records
    ]


def _transfer(step: RecordedStep, record: TaskRecord) -> str:
    """Where a task's input came from, and how long that took."""
    sender = step.trace.sender(record)
    if sender is None or sender.stage == record.stage:
        return ""
    return f"stage {sender.stage}, {milliseconds(max(record.ready - sender.end, 0.0))} ms on its way"


def _delays(step: RecordedStep, records: Sequence[TaskRecord]) -> list[Row]:
    """The ends of tasks that injected delays are."""
    begin = step.trace.start
    return [
        {
            "s": record.stage,
            "a": milliseconds(record.computed - begin),
            "b": milliseconds(record.end - begin),
            "k": DELAY,
            "t": str(record.task),
        }
        for record in records
        if record.delayed
    ]


def _idle(step: RecordedStep) -> list[Row]:
    trace = step.trace
    return [
        {
            "s": idle.stage,
            "a": milliseconds(idle.start - trace.start),
            "b": milliseconds(idle.end - trace.start),
            "k": MEANING[idle.cause],
            "t": "" if idle.source is None else f"{idle.source[1]} of stage {idle.source[0]}",
        }
        for idle in idleness(trace, step.fixed_order, step.grouped)
        if idle.seconds > LEAST_IDLE * trace.makespan
    ]


def _critical(step: RecordedStep) -> list[Row]:
    begin = step.trace.start
    return [
        {"s": part.stage, "a": milliseconds(part.start - begin), "b": milliseconds(part.end - begin)}
        for part in critical_path(step.trace, step.grouped)
        if part.cause is None
    ]


def _tip(field: str, title: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:{'N' if field in 'ktn' else 'Q'}", title=title)
