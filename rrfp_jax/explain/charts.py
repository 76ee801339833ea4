"""The charts of a report beside its timeline, as Vega-Lite specifications that the reader's browser draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import altair as alt

from rrfp_jax.core.measure.idleness import Cause, stage_times
from rrfp_jax.core.measure.recorded_step import RecordedStep
from rrfp_jax.explain.explanation import MEANING, Explanation, TimedStep
from rrfp_jax.explain.plot import CAUSES, WIDTH, Plot, colours, milliseconds

LABELS = 320
"""Pixels left of bars for what they are."""


def shares(explanation: Explanation) -> Plot:
    """One bar of all shares of the time."""
    rows, at = [], 0.0
    shown = {name: share for name, share in explanation.shares.items() if share >= 0.0005}
    for name, share in shown.items():
        rows.append({"name": MEANING[name], "from": at, "to": at + share, "share": f"{share:.1%}"})
        at += share
    scale = colours({MEANING[name]: CAUSES[name] for name in shown})
    legend = alt.Legend(title=None, orient="bottom", columns=3, labelLimit=LABELS)
    chart = (
        alt.Chart(alt.NamedData("shares"), width=WIDTH, height=36)
        .mark_rect(stroke="white")
        .encode(
            x=alt.X("from:Q", title=None, axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            x2="to:Q",
            color=alt.Color("name:N", scale=scale, legend=legend),
            tooltip=[alt.Tooltip("name:N", title=" "), alt.Tooltip("share:N")],
        )
    )
    return Plot(chart, {"shares": rows})


def savings(explanation: Explanation) -> Plot:
    """What each change would save, the largest first."""
    rows = [{"change": saving.change, "share": saving.share} for saving in explanation.savings]
    axis = alt.Axis(format="%", tickCount=6)
    bars = alt.Chart(alt.NamedData("savings"), width=WIDTH - LABELS).encode(
        y=alt.Y("change:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABELS)),
        x=alt.X("share:Q", title="saved, of the time of the steps' tasks", axis=axis),
    )
    text = bars.mark_text(align="left", dx=4).encode(text=alt.Text("share:Q", format=".1%"))
    return Plot(bars.mark_bar(color=CAUSES["compute"]) + text, {"savings": rows})


def stages(step: RecordedStep) -> Plot:
    """How each stage spent the step."""
    span = step.trace.makespan or 1.0
    rows = []
    for stage, time in enumerate(stage_times(step.trace, step.fixed_order, step.grouped)):
        for order, (name, own) in enumerate(time.seconds.items()):
            what = {"stage": stage, "name": MEANING[name], "share": own / span, "order": order}
            rows.append(what | {"ms": milliseconds(own)})
    scale = colours({MEANING[name]: CAUSES[name] for name in ("compute", "delayed", *Cause)})
    axis = alt.Axis(format="%")
    chart = (
        alt.Chart(alt.NamedData("stages"), width=WIDTH, height=alt.Step(row_height(step.trace.stages)))
        .mark_bar()
        .encode(
            y=alt.Y("stage:O", title="stage"),
            x=alt.X("share:Q", title="of the step", axis=axis, scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("name:N", scale=scale, legend=None),
            order="order:Q",
            tooltip=["stage:O", alt.Tooltip("name:N", title="what"), "ms:Q"],
        )
    )
    return Plot(chart, {"stages": rows})


def links(steps: Sequence[TimedStep]) -> Plot:
    """What messages took on each link, and how long after their arrival the stage began with them."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        trace = step.recorded.trace
        for sender in trace.records:
            receiver = trace.receiver(sender)
            if receiver is not None and receiver.stage != sender.stage:
                took, slack = receiver.ready - sender.end, receiver.start - receiver.ready
                found[sender.stage, receiver.stage].append((max(took, 0.0), max(slack, 0.0)))
    rows = []
    for (a, b), messages in sorted(found.items()):
        ways, slacks = sorted(own for own, _ in messages), [own for _, own in messages]
        late = ways[int(0.95 * (len(ways) - 1) + 0.5)]
        figures = {"took, median": median(ways), "took, p95": late, "slack, median": median(slacks)}
        for what, figure in figures.items():
            rows.append({"link": f"{a} to {b}", "what": what, "ms": milliseconds(figure)})
    scale = colours({"took, median": "#0072b2", "took, p95": "#d55e00", "slack, median": "#009e73"})
    chart = (
        alt.Chart(alt.NamedData("links"), width=WIDTH - 120)
        .mark_point(filled=True, size=60)
        .encode(
            y=alt.Y("link:N", sort=None),
            x="ms:Q",
            color=alt.Color("what:N", title=None, scale=scale),
            tooltip=["link:N", "what:N", "ms:Q"],
        )
    )
    return Plot(chart, {"links": rows})


def step_times(steps: Sequence[TimedStep]) -> Plot:
    """How long each step took."""
    rows = [
        {"step": step.recorded.trace.step, "what": what, "ms": milliseconds(seconds)}
        for step in steps
        for what, seconds in (("whole step", step.wall_seconds), ("its tasks", step.recorded.trace.makespan))
    ]
    chart = (
        alt.Chart(alt.NamedData("step_times"), width=WIDTH - 120, height=160)
        .mark_line(point=True)
        .encode(
            x=alt.X("step:O", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("ms:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("what:N", title=None),
            tooltip=["step:O", "what:N", "ms:Q"],
        )
    )
    return Plot(chart, {"step_times": rows})


def row_height(stages: int) -> int:
    """Pixels of a stage's row."""
    return 24 if stages <= 16 else 12 if stages <= 64 else 4
