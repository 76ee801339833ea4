"""The charts of a report, as Vega-Lite specifications that the reader's browser draws.

The heat map shows who computes slower than the others, stage by replica, or stage by step where there is one
replica: as in ByteDance's SMon (arXiv:2505.05713), the mean would be ideal. A hot spot is a slow worker, a
stripe an uneven stage, a column a step of much data, and scatter is lengths.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

import altair as alt

from rrfp_jax.core.tasks import KINDS, Direction, Kind
from rrfp_jax.report.explanation import Explanation
from rrfp_jax.report.sentence import MEANING
from rrfp_jax.report.store import StepLine
from rrfp_jax.report.tails import quantile
from rrfp_jax.trace.idleness import CAUSES, Cause, stage_times
from rrfp_jax.trace.records import RecordedStep, StepTrace

WIDTH = 1000
"""Of a chart, in pixels."""

COLOURS: Mapping[str, str] = {
    "compute": "#0072b2",
    "delayed": "#ff69b4",
    **{cause: row.colour for cause, row in CAUSES.items()},
    "data": "#000000",
    "planning": "#999999",
    "between": "#b8b8a0",
}
"""The colour of each share of an explanation."""

Row: TypeAlias = Mapping[str, Any]


class Plot(NamedTuple):
    """A chart, and the rows of the data that it names: altair checks the one, which the other would slow."""

    chart: Any
    rows: Mapping[str, Sequence[Row]]

    def spec(self) -> dict[str, Any]:
        """For vega-embed."""
        return {**self.chart.to_dict(), "datasets": self.rows}


def colours(found: Mapping[str, str]) -> alt.Scale:
    """A scale that gives each name its colour."""
    return alt.Scale(domain=list(found), range=list(found.values()))


def milliseconds(seconds: float) -> float:
    """To the microsecond: more digits would only make the file larger."""
    return round(seconds * 1e3, 3)


def row_height(stages: int) -> float:
    """Pixels of a stage's row: a picture of 512 stages is still one screen high."""
    return min(24.0, max(576 / stages, 1.5))


def thinned() -> alt.Axis:
    """An axis of names, upright, without those for which there is no room."""
    return alt.Axis(labelOverlap=True, labelAngle=0)


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


class Cell(NamedTuple):
    """How long a stage of a replica, or in a step, was busy (s), and how many times the mean that is."""

    stage: int
    column: int
    seconds: float
    slowdown: float


def slowdowns(traces: Sequence[StepTrace]) -> tuple[str, list[Cell]]:
    """What the columns are, "replica" or "step", and the cells.

    Args:
        traces: of steps, the latest last; with replicas, those count that have as many as the last one.
    """
    replicas = len(traces[-1].busy_by_replica)
    stages = range(traces[-1].stages)
    if replicas:
        alike = [trace.busy_by_replica for trace in traces if len(trace.busy_by_replica) == replicas]
        columns = [
            (r, [fmean(busy[r][stage] for busy in alike) for stage in stages]) for r in range(replicas)
        ]
    else:
        columns = [(trace.step, [trace.busy(stage) for stage in stages]) for trace in traces]
    mean = fmean(seconds for _, column in columns for seconds in column) or 1.0
    cells = [
        Cell(stage, number, seconds, seconds / mean)
        for number, column in columns
        for stage, seconds in enumerate(column)
    ]
    return ("replica" if replicas else "step"), cells


def heatmap(traces: Sequence[StepTrace]) -> Plot:
    """The cells, red where they are slower than the mean."""
    what, cells = slowdowns(traces)
    columns = len({cell.column for cell in cells})
    rows = [
        {"s": cell.stage, "c": cell.column, "x": round(cell.slowdown, 4), "ms": milliseconds(cell.seconds)}
        for cell in cells
    ]
    most = max(0.1, *(abs(cell.slowdown - 1) for cell in cells))  # small differences stay pale
    scale = alt.Scale(scheme="redblue", reverse=True, domain=[1 - min(most, 1), 1 + most], domainMid=1)
    chart = (
        alt.Chart(
            alt.NamedData("heatmap"),
            width=alt.Step(min(40, (WIDTH - 160) / columns)),
            height=alt.Step(row_height(traces[-1].stages)),
        )
        .mark_rect()
        .encode(
            x=alt.X("c:O", title=what, axis=thinned()),
            y=alt.Y("s:O", title="stage", axis=thinned()),
            color=alt.Color("x:Q", title="times the mean", scale=scale),
            tooltip=[
                alt.Tooltip("s:O", title="stage"),
                alt.Tooltip("c:O", title=what),
                alt.Tooltip("x:Q", title="times the mean", format=".2f"),
                alt.Tooltip("ms:Q", title="ms busy"),
            ],
        )
    )
    return Plot(chart, {"heatmap": rows})


def slowest(traces: Sequence[StepTrace]) -> str:
    """The slowest cell in words."""
    what, cells = slowdowns(traces)
    cell = max(cells, key=lambda cell: cell.slowdown)
    where = f"of replica {cell.column}" if what == "replica" else f"in step {cell.column}"
    return f"Busy longest: stage {cell.stage} {where}, {cell.slowdown:.2f} times the mean."


MOST_POINTS = 600
"""Of longer runs the median of so many steps in a row is drawn, and their longest."""

MOST_MARKS = 60
"""Of what changed, the latest."""

MOST_MEDIANS = 4.0
"""Times the median; what took longer, such as a step that compiled, is drawn at the edge."""

RATE_CHANGE = 2.0
"""By which factor a learning rate must differ from where it was last marked to be marked again."""


def history(runs: Mapping[str, Sequence[StepLine]]) -> Plot:
    """Lines of runs by their names, on the same axes, with a mark wherever something changed.

    Args:
        runs: all their steps, at least one each.
    """
    rows = [row for run, lines in runs.items() for row in _rows(run, lines, len(runs) > 1)]
    marks = [
        {"step": step, "what": f"{run}: {what}" if len(runs) > 1 else what}
        for run, lines in runs.items()
        for step, what in changes(lines)[-MOST_MARKS:]
    ]
    last = max(lines[-1].step for lines in runs.values())
    usual = median(line.wall_seconds for lines in runs.values() for line in lines)
    longest = max(line.wall_seconds for lines in runs.values() for line in lines)
    top = milliseconds(min(longest, MOST_MEDIANS * usual))
    x = alt.X("step:Q", scale=alt.Scale(domain=[0, max(last, 1)], nice=False), axis=alt.Axis(tickMinStep=1))
    lines = (
        alt.Chart(alt.NamedData("history"))
        .mark_line(point=len(rows) <= 120)
        .encode(
            x=x,
            y=alt.Y("ms:Q", title="ms", scale=alt.Scale(domain=[0, top], clamp=True)),
            color=alt.Color("what:N", title=None, sort=None),
            tooltip=["step:Q", "what:N", "ms:Q"],
        )
    )
    rules = (
        alt.Chart(alt.NamedData("changes"))
        .mark_rule(strokeDash=[4, 3], color="#555555", strokeWidth=2)
        .encode(x=x, tooltip=["step:Q", alt.Tooltip("what:N", title="changed")])
    )
    chart = alt.layer(rules, lines).properties(width=WIDTH - 160, height=200)
    return Plot(chart, {"history": rows, "changes": marks})


def changes(lines: Sequence[StepLine]) -> list[tuple[int, str]]:
    """What changed in a run, by step: schedule, learning rate, restarts, and updates that were left out."""
    found: list[tuple[int, str]] = []
    marked = _rate(lines[0])
    for before, line in pairwise(lines):
        if line.resumed:
            found.append((line.step, "the run was started again"))
        if line.schedule != before.schedule:
            found.append((line.step, f"schedule {before.schedule} -> {line.schedule}"))
        if not line.applied:
            found.append((line.step, "the update was left out: not finite"))
        rate = _rate(line)
        if rate is not None and not _alike(rate, marked):
            found.append((line.step, f"learning rate {rate:.3g}"))
            marked = rate
    return found


def _rate(line: StepLine) -> float | None:
    rates = [own for name, own in line.hyperparams.items() if name.endswith("learning_rate")]
    return rates[0] if rates else None


def _alike(rate: float, marked: float | None) -> bool:
    if marked is None:
        return False
    low, high = sorted((abs(rate), abs(marked)))
    return high <= RATE_CHANGE * low


def _rows(run: str, lines: Sequence[StepLine], several: bool) -> Iterator[Row]:
    """Of several runs only whole steps; of one run also what of them tasks and data took."""
    size = -(-len(lines) // MOST_POINTS) or 1
    for first in range(0, len(lines), size):
        own = lines[first : first + size]
        whole = [line.wall_seconds for line in own]
        figures = {run if several else "whole step": median(whole)}
        if size > 1 and not several:
            figures[f"the longest of {size}"] = max(whole)
        if not several:
            figures["its tasks"] = median(line.step_seconds for line in own)
            if any(line.load_seconds > 0.01 * line.wall_seconds for line in lines):
                figures["waiting for data"] = median(line.load_seconds for line in own)
        for what, seconds in figures.items():
            yield {"step": own[0].step, "what": what, "ms": milliseconds(seconds)}


def lengths(steps: Sequence[RecordedStep]) -> Plot:
    """The median of each bucket and kind, and where nine of ten tasks are."""
    found: dict[tuple[str, Kind], list[float]] = defaultdict(list)
    for step in steps:
        for record in step.trace.records:
            bucket = step.buckets[record.task.microbatch]
            found[bucket, record.task.kind].append(record.computed - record.start)
    labels = short({bucket for bucket, _ in found})
    rows = []
    for (bucket, kind), seconds in found.items():
        seconds.sort()
        low, middle, high = (milliseconds(quantile(seconds, at)) for at in (0.05, 0.5, 0.95))
        of = {"bucket": labels[bucket], "kind": KINDS[kind].title, "tasks": len(seconds)}
        rows.append(of | {"low": low, "median": middle, "high": high})
    kinds = {KINDS[kind].title: KINDS[kind].colour for kind in sorted({kind for _, kind in found})}
    x = alt.X("bucket:N", title=None, sort=[labels[bucket] for bucket in _sorted(labels)], axis=thinned())
    base = alt.Chart(alt.NamedData("lengths"), width=WIDTH - 160, height=200).encode(
        x=x,
        xOffset=alt.XOffset("kind:N", sort=list(kinds)),
        color=alt.Color("kind:N", title=None, scale=colours(kinds)),
        tooltip=["bucket:N", "kind:N", *(alt.Tooltip(f"{n}:Q") for n in ("median", "low", "high", "tasks"))],
    )
    ranges = base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title="ms"), y2="high:Q")
    return Plot(ranges + base.mark_point(filled=True, size=50).encode(y="median:Q"), {"lengths": rows})


def short(buckets: set[str]) -> dict[str, str]:
    """A bucket's largest shape, such as "4 x 128", where that tells buckets apart; else its whole name."""
    found = {bucket: " x ".join(map(str, _shape(bucket))) or bucket for bucket in buckets}
    return found if len(set(found.values())) == len(found) else {bucket: bucket for bucket in buckets}


def _sorted(buckets: dict[str, str]) -> list[str]:
    """By size, then by name; names that are numbers as numbers."""

    def size(bucket: str) -> tuple[int, str]:
        return (int(bucket) if bucket.isdecimal() else math.prod(_shape(bucket))), bucket

    return sorted(buckets, key=size)


def _shape(bucket: str) -> tuple[int, ...]:
    """The largest in a bucket's name; empty if it has none."""
    texts = re.findall(r"\[([\d,]+)\]", bucket)
    return max((tuple(map(int, text.split(","))) for text in texts), key=math.prod, default=())


FIGURES = {"took, median": "#0072b2", "took, p95": "#d55e00", "slack, median": "#009e73"}


class LinkMessages(NamedTuple):
    """A directed link: between which stages, in which direction of the model, and its messages' seconds."""

    sender: int
    receiver: int
    direction: Direction
    took: list[float]
    slack: list[float]

    @property
    def name(self) -> str:
        """From where to where."""
        return f"{self.sender} to {self.receiver}"


def links_of(traces: Sequence[StepTrace]) -> list[LinkMessages]:
    """All links that had messages, by direction, then by stages."""
    found: dict[tuple[Direction, int, int], list[tuple[float, float]]] = defaultdict(list)
    for trace in traces:
        for message in trace.transfers():
            sender, receiver = message
            key = sender.task.kind.direction, sender.stage, receiver.stage
            found[key].append((message.seconds, max(receiver.start - receiver.ready, 0.0)))
    return [
        LinkMessages(a, b, direction, *(list(own) for own in zip(*messages, strict=True)))
        for (direction, a, b), messages in sorted(found.items())
    ]


def links(traces: Sequence[StepTrace]) -> Plot:
    """Two rows: links that carry activations, and those that carry gradients."""
    rows = []
    for link in links_of(traces):
        carries = "activations" if link.direction is Direction.FORWARD else "gradients"
        took, slack = sorted(link.took), sorted(link.slack)
        seconds = (quantile(took, 0.5), quantile(took, 0.95), quantile(slack, 0.5))
        for what, own in zip(FIGURES, seconds, strict=True):
            rows.append({"link": link.name, "carries": carries, "what": what, "ms": milliseconds(own)})
    chart = (
        alt.Chart(alt.NamedData("links"), width=WIDTH - 160, height=120)
        .mark_point(filled=True, size=40)
        .encode(
            x=alt.X("link:N", sort=None, title=None, axis=thinned()),
            y=alt.Y("ms:Q"),
            color=alt.Color("what:N", title=None, scale=colours(FIGURES)),
            tooltip=["link:N", "carries:N", "what:N", "ms:Q"],
        )
        .facet(row=alt.Row("carries:N", title=None))
        .resolve_scale(x="independent")
    )
    return Plot(chart, {"links": rows})


def tightest(traces: Sequence[StepTrace]) -> str:
    """The link whose messages have least slack beyond what they take, in words."""
    found = links_of(traces)
    link = min(found, key=lambda link: quantile(sorted(link.slack), 0.5) - quantile(sorted(link.took), 0.5))
    took, slack = (quantile(sorted(own), 0.5) * 1e3 for own in (link.took, link.slack))
    return (
        f"Least slack: the link from stage {link.sender} to {link.receiver}, where a message takes "
        f"{took:.2f} ms and is there {slack:.2f} ms before the stage begins with it (medians)."
    )
