"""The bars of a report, as Vega-Lite specifications that the reader's browser draws."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt

from rrfp_jax.explain.explanation import Explanation
from rrfp_jax.explain.meaning import MEANING
from rrfp_jax.explain.plot import COLOURS, WIDTH, Plot, colours, milliseconds, row_height, thinned
from rrfp_jax.trace.idleness import Cause, stage_times
from rrfp_jax.trace.records import RecordedStep

LABELS = 320
"""Pixels left of bars for what they are."""

NAMES = 160
"""Pixels for the names of runs."""


def shares(runs: Mapping[str, Mapping[str, float]], seconds: Mapping[str, float] | None = None) -> Plot:
    """All shares of the time as one bar for each run.

    Args:
        runs: their shares by the run's name, as an `Explanation` has them.
        seconds: by the run's name, what a step took; bars are as long. Without, they all are 100 % long.
    """
    several = seconds is not None
    rows = []
    for run, found in runs.items():
        scale, at = (1.0 if seconds is None else seconds[run] * 1e3), 0.0
        for name, share in found.items():
            if share >= 0.0005:
                of = {"run": run, "name": MEANING[name], "share": f"{share:.1%}"}
                rows.append(of | {"from": at * scale, "to": (at + share) * scale})
                at += share
    shown = {row["name"] for row in rows}
    look = {MEANING[name]: colour for name, colour in COLOURS.items() if MEANING[name] in shown}
    if several:
        x = alt.X("from:Q", title="ms of a step", scale=alt.Scale(zero=True, nice=False))
    else:
        x = alt.X("from:Q", title=None, axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
    chart = (
        alt.Chart(alt.NamedData("shares"), width=WIDTH - several * NAMES, height=alt.Step(36))
        .mark_rect(stroke="white")
        .encode(
            y=alt.Y("run:N", title=None, sort=None, axis=alt.Axis(labelLimit=NAMES) if several else None),
            x=x,
            x2="to:Q",
            color=alt.Color(
                "name:N",
                scale=colours(look),
                legend=alt.Legend(title=None, orient="bottom", columns=3, labelLimit=LABELS),
            ),
            tooltip=[alt.Tooltip("run:N"), alt.Tooltip("name:N", title=" "), alt.Tooltip("share:N")],
        )
    )
    return Plot(chart, {"shares": rows})


def savings(explanation: Explanation) -> Plot:
    """What each change would save, the largest first."""
    rows = [{"change": saving.change, "share": saving.share} for saving in explanation.savings]
    axis = alt.Axis(format="%", tickCount=6)
    bars = alt.Chart(alt.NamedData("savings"), width=WIDTH - LABELS).encode(
        y=alt.Y("change:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABELS)),
        x=alt.X("share:Q", title="saved, of a step's whole time", axis=axis),
    )
    text = bars.mark_text(align="left", dx=4).encode(text=alt.Text("share:Q", format=".1%"))
    return Plot(bars.mark_bar(color=COLOURS["compute"]) + text, {"savings": rows})


def stages(step: RecordedStep, longest: float) -> Plot:
    """How each stage spent the step.

    Args:
        step: that ran.
        longest: where the axis ends (s).
    """
    span = step.trace.makespan or 1.0
    rows = []
    for stage, time in enumerate(stage_times(step.trace, step.fixed_order, step.grouped)):
        for order, (name, own) in enumerate(time.seconds.items()):
            if own:
                what = {"stage": stage, "name": MEANING[name], "share": own / span, "order": order}
                rows.append(what | {"ms": milliseconds(own)})
    scale = colours({MEANING[name]: COLOURS[name] for name in ("compute", "delayed", *Cause)})
    chart = (
        alt.Chart(alt.NamedData("stages"), width=WIDTH, height=alt.Step(row_height(step.trace.stages)))
        .mark_bar()
        .encode(
            y=alt.Y("stage:O", title="stage", axis=thinned()),
            x=alt.X("ms:Q", title="ms", scale=alt.Scale(domain=[0, milliseconds(longest)])),
            color=alt.Color("name:N", scale=scale, legend=None),
            order="order:Q",
            tooltip=[
                "stage:O",
                alt.Tooltip("name:N", title="what"),
                "ms:Q",
                alt.Tooltip("share:Q", format=".1%"),
            ],
        )
    )
    return Plot(chart, {"stages": rows})
