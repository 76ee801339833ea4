"""The charts of pictures and reports, as Vega-Lite specifications.

The heat map shows who computes slower than the others, stage by replica, or stage by step where there is one
replica: as in ByteDance's SMon (arXiv:2505.05713), the mean would be ideal. A hot spot is a slow worker, a
stripe an uneven stage, a column a step of much data, and scatter is lengths.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

import altair as alt

from rrfp_jax.core.step_rules import charges_of
from rrfp_jax.core.tasks import KINDS, Direction
from rrfp_jax.report.critical_path import critical_path
from rrfp_jax.report.legend import CAUSES, DELAY, DRAWN, SHARES
from rrfp_jax.report.store import StepLine
from rrfp_jax.report.timeline import Panel, gaps_of, of_gap, of_task, unit_of
from rrfp_jax.trace.idleness import Idle, stage_times
from rrfp_jax.trace.records import RecordedStep, StepTrace, charged, peak_charge

WIDTH = 1000
"""Of a chart, in pixels."""

Row: TypeAlias = Mapping[str, Any]


TEXT = 12
"""Pixels of the letters of a page's charts."""


class Plot(NamedTuple):
    """A chart, and the rows of the data that it names: altair checks the one, which the other would slow."""

    chart: Any
    rows: Mapping[str, Sequence[Row]]

    def spec(self) -> dict[str, Any]:
        """What vega-embed and vl-convert draw."""
        return {**self.chart.to_dict(), "datasets": self.rows}

    def readable(self) -> dict[str, Any]:
        """The same with letters that are large enough for a page."""
        spec = self.spec()
        sizes = {"labelFontSize": TEXT, "titleFontSize": TEXT}
        parts = {"axis": sizes, "legend": sizes | {"labelLimit": 320}, "header": sizes}
        return {**spec, "config": {**spec.get("config", {}), **parts}}


def milliseconds(seconds: float) -> float:
    """To the microsecond: more digits would only make the file larger."""
    return round(seconds * 1e3, 3)


def row_height(stages: int) -> float:
    """Pixels of a stage's row: a picture of 512 stages is still one screen high."""
    return min(24.0, max(576 / stages, 1.5))


def thinned(**more: Any) -> alt.Axis:
    """An axis of names, upright, without those for which there is no room."""
    return alt.Axis(labelOverlap=True, labelAngle=0, **more)


def coloured(colours: Mapping[str, str]) -> alt.Scale:
    """A scale that gives each name its colour."""
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def _by_stage(name: str, stages: int, width: Any) -> alt.Chart:
    y = alt.Y("s:O", title="stage", axis=thinned())
    return alt.Chart(alt.NamedData(name), width=width, height=alt.Step(row_height(stages))).encode(y=y)


def _tips(titles: Mapping[str, str]) -> list[alt.Tooltip]:
    return [alt.Tooltip(field, title=title) for field, title in titles.items()]


# A step, stage by time.

MOST_DRAWN = 38_000
"""That are drawn; of a larger step some stages are left out."""

LEAST_IDLE = 1e-3
"""Part of the step below which an idle time is left out."""

CHUNKS, PALER = "paler: later chunks", 0.45
"""How far the colour of a stage's last chunk is from its first one's to white."""

PICTURE_ROW, FONT, DIGIT = 28, 9, 6.0
"""Heights of a picture's rows and numbers, and a digit's width, in pixels."""

DARK, LIGHT, HALFWAY = "#202020", "white", 0.5
"""Inks, and the brightness of a box from which on its number is dark."""


def drawn_stages(step: RecordedStep) -> list[int]:
    """All stages, or so many of a large step that its picture is still fast: some of every part of it.

    The first, the last and the one that is busy longest are always among them.
    """
    trace = step.trace
    most = MOST_DRAWN * trace.stages // max(1, len(trace.records))
    if most >= trace.stages:
        return list(range(trace.stages))
    spread = max(most - 1, 2)  # beside the busiest one
    even = {i * (trace.stages - 1) // (spread - 1) for i in range(spread)}
    return sorted(even | {max(range(trace.stages), key=trace.busy)})


def picture(panels: Sequence[Panel]) -> Plot:
    """Panels under one another on one time scale, with the tasks' numbers."""
    longest = max(panel.trace.makespan for panel in panels)
    legend, charts = _legend(panels), []
    rows: dict[str, list[Row]] = {}
    for number, panel in enumerate(panels):
        layers, own = _step(panel, longest, range(panel.trace.stages), legend, str(number))
        causes = f"idle: {panel.causes}" if panel.causes else ""
        title = alt.TitleParams(panel.heading, subtitle=causes, anchor="start")
        charts.append(alt.layer(*layers, title=title, width=WIDTH, height=alt.Step(PICTURE_ROW)))
        rows |= own
    return Plot(alt.vconcat(*charts).resolve_scale(color="shared").configure_view(stroke=None), rows)


def timeline(step: RecordedStep) -> Plot:
    """A step that can be zoomed, with its critical path."""
    panel, stages = Panel("", step), drawn_stages(step)
    layers, rows = _step(panel, step.trace.makespan, stages, _legend([panel]), "")
    scale, start = unit_of(step.trace.makespan)[0], step.trace.start
    rows["critical"] = [
        {"s": part.stage, "a": _at(part.start - start, scale), "b": _at(part.end - start, scale)}
        for part in critical_path(step.trace, step.grouped)
        if part.cause is None and part.stage in stages
    ]
    outlined = alt.Chart(alt.NamedData("critical")).mark_rect(fillOpacity=0, stroke="black", strokeWidth=1.2)
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    outlined = outlined.encode(x="a:Q", x2="b:Q", y="s:O").add_params(zoom)
    chart = alt.layer(*layers, outlined)
    return Plot(chart.properties(width=WIDTH, height=alt.Step(row_height(len(stages)))), rows)


def _legend(panels: Sequence[Panel]) -> dict[str, str]:
    """The colours of what is drawn, by name."""
    records = [record for panel in panels for record in panel.trace.records]
    kinds = [KINDS[kind] for kind in sorted({record.task.kind for record in records})]
    found = {f"{kind.letter}: {kind.title}": kind.colour for kind in kinds}
    if any(record.task.chunk for record in records):
        red, green, blue = (round(255 * (PALER + (1 - PALER) * part)) for part in _rgb(KINDS[0].colour))
        found[CHUNKS] = f"#{red:02x}{green:02x}{blue:02x}"
    if any(record.delayed for record in records):
        found[DELAY] = SHARES["delayed"].colour
    drawn = {CAUSES[idle.cause].drawn for panel in panels for idle in panel.idle if _is_drawn(idle, panel)}
    return found | {name: colour for key, (name, colour) in DRAWN.items() if key in drawn}


def _is_drawn(idle: Idle, panel: Panel) -> bool:
    return idle.seconds > LEAST_IDLE * panel.trace.makespan


def _step(
    panel: Panel, longest: float, stages: Sequence[int], legend: Mapping[str, str], key: str
) -> tuple[list[Any], dict[str, list[Row]]]:
    """The layers of a panel and their rows; with a `key`, which names its data, they are of a picture.

    Rows have short names, since there are many: stage, from, to, kind, text.
    """
    longest = longest or 1.0  # of steps that take no time
    (scale, unit), picture = unit_of(longest), bool(key)
    rows: dict[str, list[Row]] = {name + key: [] for name in ("idle", "tasks", "delays", "numbers")}
    trace, start, chunks = panel.trace, panel.trace.start, panel.trace.placement.chunks
    for record in [record for record in trace.records if record.stage in stages]:
        _, chunk, microbatch = record.task
        kind, tip = KINDS[record.task.kind], of_task(panel, record)
        a, b = _at(record.start - start, scale), _at(record.end - start, scale)
        row = {"s": record.stage, "a": a, "b": b, "k": f"{kind.letter}: {kind.title}", "t": tip}
        rows["tasks" + key].append(row | ({"o": 1 - PALER * chunk / (chunks - 1)} if chunk else {}))
        if record.delayed:
            computed = _at(record.computed - start, scale)
            rows["delays" + key].append(row | {"a": computed, "k": DELAY})
        if picture and (b - a) / scale / longest * WIDTH > DIGIT * len(str(microbatch)) + 2:
            ink = DARK if chunk or _brightness(kind.colour) > HALFWAY else LIGHT
            rows["numbers" + key].append({"s": record.stage, "a": (a + b) / 2, "m": microbatch, "i": ink})
    for parts in [parts for parts in gaps_of(panel) if parts[0].stage in stages]:
        tip = of_gap(panel, parts)
        for idle in parts:
            if _is_drawn(idle, panel):
                a, b = _at(idle.start - start, scale), _at(idle.end - start, scale)
                name, _ = DRAWN[CAUSES[idle.cause].drawn]
                rows["idle" + key].append({"s": idle.stage, "a": a, "b": b, "k": name, "t": tip})
    title = f"time ({unit})" + ("; the number in a box is its microbatch" if picture else "")
    whole = alt.Scale(domain=[0, longest * scale], nice=False)
    x = alt.X("a:Q", title=title, scale=whole, axis=alt.Axis(grid=False))
    names = {"labelExpr": f"{json.dumps(panel.rows)}[datum.value]", "labelLimit": 300} if picture else {}
    y = alt.Y("s:O", title=None if picture else "stage", axis=thinned(**names))
    colour = alt.Color("k:N", scale=coloured(legend), legend=alt.Legend(title=None, orient="bottom"))
    text = {"description": alt.Description("t:N")} if picture else {"tooltip": alt.Tooltip("t:N")}
    layers = []
    for name in ("idle", "tasks", "delays"):
        boxes = alt.Chart(alt.NamedData(name + key)).mark_rect(stroke="white", strokeWidth=0.4)
        layers.append(boxes.encode(x=x, x2="b:Q", y=y, color=colour, **text))
    if chunks > 1:
        opacity = alt.condition("isValid(datum.o)", "o:Q", alt.value(1), scale=None)
        layers[1] = layers[1].encode(fillOpacity=opacity)
    if picture:
        numbers = alt.Chart(alt.NamedData("numbers" + key)).mark_text(fontSize=FONT, aria=False)
        fill = alt.Fill("i:N", scale=None, legend=None)
        layers.append(numbers.encode(x=x, y=y, text="m:N", fill=fill))
    return layers, rows


def _at(seconds: float, scale: float) -> float:
    return round(seconds * scale, 5)


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _brightness(colour: str) -> float:
    red, green, blue = _rgb(colour)
    return 0.3 * red + 0.59 * green + 0.11 * blue


# What stages did.


def stages(step: RecordedStep) -> Plot:
    """How each stage spent the step."""
    span = step.trace.makespan or 1.0
    rows = [
        {"s": stage, "n": SHARES[name].words, "x": round(own / span, 7), "o": order, "ms": milliseconds(own)}
        for stage, times in enumerate(stage_times(step.trace, step.fixed_order, step.grouped))
        for order, (name, own) in enumerate(times.items())
        if own
    ]
    legend = alt.Legend(title=None, orient="bottom", columns=3, labelLimit=320)
    seen = {row["n"] for row in rows}
    scale = coloured({share.words: share.colour for share in SHARES.values() if share.words in seen})
    chart = _by_stage("stages", step.trace.stages, WIDTH).encode(
        x=alt.X("ms:Q", title="ms", scale=alt.Scale(domain=[0, milliseconds(span)])),
        color=alt.Color("n:N", scale=scale, legend=legend),
        order="o:Q",
        tooltip=_tips({"s:O": "stage", "n:N": "what", "ms:Q": "ms", "x:Q": "share"}),
    )
    return Plot(chart.mark_bar(), {"stages": rows})


class Cell(NamedTuple):
    """How long a stage of a replica, or in a step, was busy (s), and how many times the mean that is."""

    stage: int
    column: int
    seconds: float
    slowdown: float


def slowdowns(traces: Sequence[StepTrace]) -> tuple[str, list[Cell]]:
    """What the columns are, "replica" or "step", and the cells; with replicas of steps with as many."""
    replicas, stages = len(traces[-1].busy_by_replica), range(traces[-1].stages)
    columns = {trace.step: [trace.busy(stage) for stage in stages] for trace in traces}
    if replicas:
        alike = [trace.busy_by_replica for trace in traces if len(trace.busy_by_replica) == replicas]
        columns = {r: [fmean(busy[r][stage] for busy in alike) for stage in stages] for r in range(replicas)}
    mean = fmean(seconds for column in columns.values() for seconds in column) or 1.0
    cells = [Cell(s, n, own, own / mean) for n, column in columns.items() for s, own in enumerate(column)]
    return ("replica" if replicas else "step"), cells


def heatmap(traces: Sequence[StepTrace]) -> Plot:
    """The cells, red where they are slower than the mean."""
    what, cells = slowdowns(traces)
    columns = len({cell.column for cell in cells})
    rows = [{"s": s, "c": c, "x": round(slow, 3), "ms": milliseconds(own)} for s, c, own, slow in cells]
    most = max(0.1, *(abs(cell.slowdown - 1) for cell in cells))  # small differences stay pale
    scale = alt.Scale(scheme="redblue", reverse=True, domain=[1 - min(most, 1), 1 + most], domainMid=1)
    width = alt.Step(min(40, (WIDTH - 160) / columns))
    chart = _by_stage("heatmap", traces[-1].stages, width).encode(
        x=alt.X("c:O", title=what, axis=thinned()),
        color=alt.Color("x:Q", title="times the mean", scale=scale),
        tooltip=_tips({"s:O": "stage", "c:O": what, "x:Q": "times the mean", "ms:Q": "ms busy"}),
    )
    return Plot(chart.mark_rect(), {"heatmap": rows})


def slowest(traces: Sequence[StepTrace]) -> str:
    """The slowest cell in words."""
    what, cells = slowdowns(traces)
    cell = max(cells, key=lambda cell: cell.slowdown)
    where = f"of replica {cell.column}" if what == "replica" else f"in step {cell.column}"
    return f"Busy longest: stage {cell.stage} {where}, {cell.slowdown:.2f} times the mean."


# Memory.

MOST_CELLS = 20_000
MOST_TIMES = 250
"""Into which the step is divided; fewer where there are many stages."""


class Held(NamedTuple):
    """What a stage was charged, from each of some times on (s), and what it might be; None for no limit."""

    stage: int
    since: list[tuple[float, float]]
    limit: int | None
    in_bytes: bool

    @property
    def peak(self) -> float:
        """The most."""
        return max(amount for _, amount in self.since)


def held(step: RecordedStep) -> list[Held]:
    """Of each stage of a step with backward: an F takes what the chunk's B or W gives back, by dispatches.

    Of several limits the one that it came closest to; without one bytes, if it has a budget.
    """
    found = []
    for stage in range(step.trace.stages):
        budget = step.budgets[stage] if step.budgets else None
        order, charges = step.trace.order(stage), charges_of(step.rules, budget)
        limited = [own for own in charges if own[1]] or charges[-1:]
        costs, limit = max(limited, key=lambda own: peak_charge(order, own[0]) / (own[1] or 1))
        times = [step.trace.start, *sorted(record.dispatched for record in step.trace.stage_records(stage))]
        since = [*zip(times, charged(order, costs), strict=True)]
        found.append(Held(stage, since, limit, budget is not None and costs is budget.costs))
    return found


def memory(step: RecordedStep) -> Plot:
    """Stage by time, the darker the more of its limit a stage holds; without limits, of the most of any."""
    stages = held(step)
    most = max(own.peak for own in stages) or 1
    times = max(1, min(MOST_TIMES, MOST_CELLS // len(stages)))
    rows = [row for own in stages for row in _held_rows(step, own, most, times)]
    title = "of its limit" if stages[0].limit is not None else "of the most"
    scale = alt.Scale(scheme="yelloworangered", domain=[0, 1])
    chart = _by_stage("memory", len(stages), WIDTH - 120).encode(
        x=alt.X("a:Q", title="ms", scale=alt.Scale(domain=[0, milliseconds(step.trace.makespan)])),
        x2="b:Q",
        color=alt.Color("x:Q", title=title, scale=scale, legend=alt.Legend(format="%")),
        tooltip=_tips({"s:O": "stage", "t:N": "at most", "a:Q": "from ms", "b:Q": "to ms"}),
    )
    return Plot(chart.mark_rect(), {"memory": rows})


def fullest(stages: Sequence[Held]) -> Held:
    """The stage that came closest to its limit, or held most if none has one."""
    limited = [own for own in stages if own.limit]
    return max(limited or stages, key=lambda own: own.peak / (own.limit or 1))


def said_of_memory(step: RecordedStep) -> str:
    """The fullest stage in words."""
    own = fullest(held(step))
    text = f"Closest to its limit: stage {own.stage}, {of_limit(own)}."
    if not own.limit:
        text = f"There is no limit. Stage {own.stage} holds most: {_amount(own, own.peak)}."
    what = "A microbatch" if step.trace.placement.chunks == 1 else "Each chunk of a microbatch"
    return text if own.in_bytes else f"{text} {what} counts from its F to its B or W."


def _held_rows(step: RecordedStep, own: Held, most: float, times: int) -> Iterator[Row]:
    """The most in each of so many parts of the step, equal neighbours as one."""
    start, width = step.trace.start, step.trace.makespan / times
    largest: list[float] = [0] * times
    for (begin, amount), (end, _) in pairwise([*own.since, (start + width * times, 0)]):
        first, last = (min(int((at - start) / width), times - 1) if width else 0 for at in (begin, end))
        for at in range(first, last + 1):
            largest[at] = max(largest[at], amount)
    at = 0
    for amount, equal in groupby(largest):
        a, at = at, at + len(list(equal))
        share = round(amount / (own.limit or most), 4)
        times_of = {"a": milliseconds(a * width), "b": milliseconds(at * width)}
        yield {"s": own.stage, **times_of, "x": share, "t": of_limit(own, amount)}


def of_limit(own: Held, amount: float | None = None) -> str:
    """An amount, or the most, and of how much that is."""
    said = _amount(own, own.peak if amount is None else amount)
    return said if own.limit is None else f"{said} of {_amount(own, own.limit)}"


def _amount(own: Held, amount: float) -> str:
    return f"{amount / 2**20:,.1f} MiB" if own.in_bytes else f"{amount} in flight"


# Links.


def quantile(ordered: Sequence[float], at: float) -> float:
    """The quantile of the nearest rank, of at least one value; the lower one between two; `at` is 0 to 1."""
    return ordered[math.ceil(at * (len(ordered) - 1) - 0.5)]


FIGURES = {"took, median": "#117733", "took, p95": "#cc6677", "slack, median": "#999999"}
"""Colours of no pass and no cause of idleness."""


class LinkMessages(NamedTuple):
    """A directed link: between which stages, in which direction of the model, and its messages' seconds."""

    sender: int
    receiver: int
    direction: Direction
    took: list[float]
    slack: list[float]

    @property
    def medians(self) -> tuple[float, float]:
        """What a message takes, and how long it is there before the stage begins with it."""
        return quantile(self.took, 0.5), quantile(self.slack, 0.5)


def links_of(traces: Sequence[StepTrace]) -> list[LinkMessages]:
    """All links that had messages, by direction, then by stages; seconds in order."""
    found: dict[tuple[Direction, int, int], list[tuple[float, float]]] = defaultdict(list)
    for trace in traces:
        for message in trace.transfers():
            sender, receiver = message
            key = sender.task.kind.direction, sender.stage, receiver.stage
            found[key].append((message.seconds, max(receiver.start - receiver.ready, 0.0)))
    return [
        LinkMessages(a, b, direction, *(sorted(own) for own in zip(*messages, strict=True)))
        for (direction, a, b), messages in sorted(found.items())
    ]


def links(traces: Sequence[StepTrace]) -> Plot:
    """Two rows: links that carry activations, and those that carry gradients."""
    rows = []
    for link in links_of(traces):
        carries = "activations" if link.direction is Direction.FORWARD else "gradients"
        took, slack = link.medians
        for what, own in zip(FIGURES, (took, quantile(link.took, 0.95), slack), strict=True):
            between = f"{link.sender} to {link.receiver}"
            rows.append({"link": between, "carries": carries, "what": what, "ms": milliseconds(own)})
    points = alt.Chart(alt.NamedData("links"), width=WIDTH - 160, height=120).mark_point(filled=True, size=40)
    chart = points.encode(
        x=alt.X("link:N", sort=None, title=None, axis=thinned()),
        y=alt.Y("ms:Q"),
        color=alt.Color("what:N", title=None, scale=coloured(FIGURES)),
        tooltip=["link:N", "carries:N", "what:N", "ms:Q"],
    )
    chart = chart.facet(row=alt.Row("carries:N", title=None)).resolve_scale(x="independent")
    return Plot(chart, {"links": rows})


def tightest(traces: Sequence[StepTrace]) -> str:
    """The link whose messages have least slack beyond what they take, in words."""
    link = min(links_of(traces), key=lambda link: link.medians[1] - link.medians[0])
    took, slack = link.medians
    return (
        f"Least slack: the link from stage {link.sender} to {link.receiver}, where a message takes "
        f"{took * 1e3:.2f} ms and is there {slack * 1e3:.2f} ms before the stage begins with it (medians)."
    )


# All steps.

MOST_POINTS = 600
"""Of longer runs the median of so many steps in a row is drawn, and their longest."""

MOST_MARKS = 60
"""Of what changed, the latest."""

MOST_MEDIANS = 4.0
"""Times the median; what took longer, such as a step that compiled, is drawn at the edge."""

CURVES = ["#117733", "#cc6677", "#41505e", "#000000"]
"""Of the whole step, the longest of several, its tasks, and data; none that a pass has."""

RATE_CHANGE = 2.0
"""By which factor a learning rate must differ from where it was last marked to be marked again."""


def history(lines: Sequence[StepLine]) -> Plot:
    """Lines of all steps, at least one, with a mark wherever something changed."""
    rows = list(_rows(lines))
    marks = [{"step": step, "what": what} for step, what in [*changes(lines)][-MOST_MARKS:]]
    seconds = [line.wall_seconds for line in lines]
    top = milliseconds(min(max(seconds), MOST_MEDIANS * median(seconds)))
    last = alt.Scale(domain=[0, max(lines[-1].step, 1)], nice=False)
    x = alt.X("step:Q", scale=last, axis=alt.Axis(tickMinStep=1))
    curves = alt.Chart(alt.NamedData("history")).mark_line(point=len(rows) <= 120)
    curves = curves.encode(
        x=x,
        y=alt.Y("ms:Q", title="ms", scale=alt.Scale(domain=[0, top], clamp=True)),
        color=alt.Color("what:N", title=None, sort=None, scale=alt.Scale(range=CURVES)),
        tooltip=["step:Q", "what:N", "ms:Q"],
    )
    dashed = alt.Chart(alt.NamedData("changes")).mark_rule(strokeDash=[4, 3], color="#555555", strokeWidth=2)
    dashed = dashed.encode(x=x, tooltip=_tips({"step:Q": "step", "what:N": "changed"}))
    chart = alt.layer(dashed, curves).properties(width=WIDTH - 160, height=200)
    return Plot(chart, {"history": rows, "changes": marks})


def changes(lines: Sequence[StepLine]) -> Iterator[tuple[int, str]]:
    """What changed in a run, by step: schedule, learning rate, restarts, and updates that were left out."""
    marked = _rate(lines[0])
    for before, line in pairwise([lines[0], *lines]):
        if line.resumed:
            yield line.step, "the run was started again"
        if line.schedule != before.schedule:
            yield line.step, f"schedule {before.schedule} -> {line.schedule}"
        if not line.applied:
            yield line.step, "the update was left out: not finite"
        rate = _rate(line)
        if rate is not None and not _alike(rate, marked):
            yield line.step, f"learning rate {rate:.3g}"
            marked = rate


def _rate(line: StepLine) -> float | None:
    return next((own for name, own in line.hyperparams.items() if name.endswith("learning_rate")), None)


def _alike(rate: float, marked: float | None) -> bool:
    low, high = sorted((abs(rate), abs(marked or 0.0)))
    return marked is not None and high <= RATE_CHANGE * low


def _rows(lines: Sequence[StepLine]) -> Iterator[Row]:
    size = -(-len(lines) // MOST_POINTS) or 1
    loads = any(line.load_seconds > 0.01 * line.wall_seconds for line in lines)
    for first in range(0, len(lines), size):
        own = lines[first : first + size]
        whole = [line.wall_seconds for line in own]
        figures = {"whole step": median(whole)}
        if size > 1:
            figures[f"the longest of {size}"] = max(whole)
        figures["its tasks"] = median(line.step_seconds for line in own)
        if loads:
            figures["waiting for data"] = median(line.load_seconds for line in own)
        for what, seconds in figures.items():
            yield {"step": own[0].step, "what": what, "ms": milliseconds(seconds)}
