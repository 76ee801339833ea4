"""Steps as a picture: one panel per step above a common time axis, one row per stage, one box per task.

All pictures of steps are drawn here, real ones and simulated ones. What has no colour is idle. Hovering over
a task tells its times, over an idle stage what it waited for.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from xml.etree import ElementTree

from rrfp_jax.core.tasks import FORWARD, KINDS, Task
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import output_of
from rrfp_jax.files import written_whole
from rrfp_jax.trace.idleness import CAUSES, Cause, Idle, idleness
from rrfp_jax.trace.records import RecordedStep, StepTrace, TaskRecord

DELAY, DELAY_COLOUR = "injected delay", "#ff69b4"
"""Of the end of a task in which its device was only kept busy."""

IDLE = {
    "nothing": ("idle: nothing is ready", "#eeeeee", ""),
    "held back": ("idle: what is ready is held back", "#c8c8c8", "////"),
    "not started": ("idle: ready, not started yet", "#8c8c8c", ""),
    "injected": ("idle: an injected delay", "#ffd9ec", ""),
}
"""What is drawn of idleness (`CauseRow.drawn`): its name, colour and hatching. Hovering tells each cause."""

DARK, LIGHT, HALFWAY = "#202020", "white", 0.5
"""Inks, and the brightness of a box from which on its number is dark."""

PALER = 0.45
"""How far the colour of a stage's last chunk is from its first one's to white."""

LEAST_SHARE = 0.01
"""Of the step; what is waited for less is left out of the title."""

LEAST = 1e-3
"""Part of the time axis below which an idle time is drawn as one in which nothing is ready."""

WIDTH, DPI = 13.0, 160
"""Of the picture in inches, and its pixels per inch."""

ROW, PANEL, FOOT = 0.30, 0.46, 0.80
"""Heights in inches: of a stage, of a panel's title and space, of axis and legend."""

THICK = 0.86
"""Of a box, as a share of its row."""

AXIS = 0.88
"""The time axis's part of the width, roughly; for the question which labels fit."""

SIZES = (7.5, 6.5, 5.5)
"""Points of the tasks' numbers: the largest with which `MOST_FIT` of the boxes can have theirs."""

MOST_FIT = 0.9

DIGIT = 0.66
"""Width of a digit, as a part of its size."""


@dataclass(frozen=True)
class Panel:
    """A step that is drawn, and what it is; its time and idleness are added to the title."""

    title: str
    step: RecordedStep

    @property
    def trace(self) -> StepTrace:
        """What happened."""
        return self.step.trace

    @cached_property
    def idle(self) -> Sequence[Idle]:
        """Every time in which a stage's device did nothing, with its cause."""
        return idleness(self.trace, self.step.fixed_order, self.step.grouped)

    @property
    def causes(self) -> str:
        """Mean shares of the step by cause of idleness, the largest first; "" if there is no idleness."""
        whole = self.trace.makespan * self.trace.stages
        found: dict[Cause, float] = dict.fromkeys(Cause, 0.0)
        for idle in self.idle:
            found[idle.cause] += idle.seconds
        shown = [
            (seconds / whole, cause) for cause, seconds in found.items() if seconds > LEAST_SHARE * whole
        ]
        return ", ".join(f"{CAUSES[cause].title} {share:.0%}" for share, cause in sorted(shown, reverse=True))


@dataclass(frozen=True)
class TimeAxis:
    """Common to all panels: the longest step in seconds, units per second, and the unit."""

    longest: float
    scale: float
    unit: str

    @classmethod
    def of(cls, panels: Sequence[Panel]) -> TimeAxis:
        """The axis on which all of them fit."""
        longest = max(panel.trace.makespan for panel in panels) or 1.0  # of steps that take no time
        return cls(longest, *_unit(longest))

    def span(self, trace: StepTrace, start: float, end: float) -> tuple[float, float]:
        """Where something begins, and its width."""
        return (start - trace.start) * self.scale, (end - start) * self.scale


def told(seconds: float) -> str:
    """A duration in a unit that suits it."""
    scale, unit = _unit(seconds)
    return f"{seconds * scale:.4g} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    """How many of a unit make a second, and its name."""
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
    return next((one for one in units if seconds * one[0] >= 1), units[1 if seconds <= 0 else 2])


def figure(panels: Sequence[Panel]) -> Any:
    """A matplotlib figure with one axes for each panel, in their order; grey is idle."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axis = TimeAxis.of(panels)
    points = _points(panels, axis)
    heights = [ROW * panel.trace.stages + PANEL for panel in panels]
    with rc_context({"hatch.linewidth": 0.5, "hatch.color": "#8c8c8c"}):
        made = Figure(figsize=(WIDTH, sum(heights) + FOOT), dpi=DPI, layout="constrained")
        FigureCanvasAgg(made)
        rows = made.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        legend: dict[str, Any] = {}
        for axes, panel in zip(rows, panels, strict=True):
            _draw_idle(axes, panel, axis, legend)
            _draw_tasks(axes, panel, axis, legend, points)
            _draw_delays(axes, panel, axis, legend)
            _describe(axes, panel, axis)
        rows[-1].set_xlabel(f"time ({axis.unit}); the number in a box is its microbatch", fontsize=9)
        order = [*(row.title for row in KINDS), CHUNKS, DELAY, *(name for name, _, _ in IDLE.values())]
        shown = [legend[name] for name in order if name in legend]
        made.legend(handles=shown, loc="outside lower center", ncols=len(shown), fontsize=8.5, frameon=False)
    return made


CHUNKS = "paler: later chunks"


def _draw_idle(axes: Any, panel: Panel, axis: TimeAxis, legend: dict[str, Any]) -> None:
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for idle in panel.idle:
        kind = CAUSES[idle.cause].drawn if idle.seconds > LEAST * axis.longest else "nothing"
        found.setdefault((idle.stage, kind), []).append(axis.span(panel.trace, idle.start, idle.end))
    for (stage, kind), spans in found.items():
        name, colour, hatch = IDLE[kind]
        look = {"facecolor": colour, "linewidth": 0, "hatch": hatch or None}
        axes.broken_barh(spans, (stage - THICK / 2, THICK), **look)
        legend[name] = _patch(name, **look)


def _points(panels: Sequence[Panel], axis: TimeAxis) -> float:
    """The size of the tasks' numbers."""
    records = [record for panel in panels for record in panel.trace.records]
    fits = (size for size in SIZES if sum(_fits(r, size, axis) for r in records) >= MOST_FIT * len(records))
    return next(fits, SIZES[-1])


def _fits(record: TaskRecord, points: float, axis: TimeAxis) -> bool:
    """Whether a task's number fits into its box."""
    room = (record.end - record.start) / axis.longest * WIDTH * AXIS * 72
    return room > DIGIT * points * len(str(record.task.microbatch)) + 0.5


def _draw_tasks(axes: Any, panel: Panel, axis: TimeAxis, legend: dict[str, Any], points: float) -> None:
    trace, chunks = panel.trace, panel.trace.placement.chunks
    for stage in range(trace.stages):
        records = trace.stage_records(stage)
        spans = [axis.span(trace, record.start, record.end) for record in records]
        colours = [_colour(record.task, chunks) for record in records]
        row = (stage - THICK / 2, THICK)
        axes.broken_barh(spans, row, facecolors=colours, edgecolor="white", linewidth=0.4)
        for (start, width), record in zip(spans, records, strict=True):
            if _fits(record, points, axis):
                ink = _ink(record.task)
                look = {"ha": "center", "va": "center_baseline", "color": ink, "fontsize": points}
                axes.text(start + width / 2, stage, str(record.task.microbatch), **look)
    for kind in {KINDS[record.task.kind] for record in trace.records}:
        legend[kind.title] = _patch(f"{kind.letter}: {kind.title}", facecolor=kind.colour)
    if chunks > 1:
        legend[CHUNKS] = _patch(CHUNKS, facecolor=_colour(Task(FORWARD, chunks - 1, 0), chunks))


def _draw_delays(axes: Any, panel: Panel, axis: TimeAxis, legend: dict[str, Any]) -> None:
    """Over the ends of tasks that were injected."""
    look = {"facecolor": DELAY_COLOUR, "linewidth": 0, "hatch": "xxxx"}
    for stage in range(panel.trace.stages):
        delayed = [record for record in panel.trace.stage_records(stage) if record.delayed]
        spans = [axis.span(panel.trace, record.computed, record.end) for record in delayed]
        if spans:
            axes.broken_barh(spans, (stage - THICK / 2, THICK), **look)
            legend[DELAY] = _patch(DELAY, **look)


def _describe(axes: Any, panel: Panel, axis: TimeAxis) -> None:
    """Title, ticks and the names of the rows."""
    trace, bubble = panel.trace, panel.trace.bubble()
    delayed = [trace.delayed(stage) / (trace.makespan or 1.0) for stage in range(trace.stages)]
    shares = [_shares(*pair) for pair in zip(bubble, delayed, strict=True)]
    mean = _shares(sum(bubble) / trace.stages, sum(delayed) / trace.stages)
    axes.set_title(f"{panel.title}: {told(trace.makespan)}, {mean}", loc="left", fontsize=10.5, weight="bold")
    if causes := panel.causes:
        axes.set_title(f"idle: {causes}", loc="right", fontsize=8, color=DARK)
    axes.set_xlim(0, axis.longest * axis.scale)
    axes.set_ylim(trace.stages - 0.5, -0.5)
    rows = [f"stage {stage}, {share}" for stage, share in enumerate(shares)]
    axes.set_yticks(range(trace.stages), rows, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, labelbottom=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _shares(idle: float, delayed: float) -> str:
    """What a stage did not compute."""
    return f"{idle:.0%} idle" + (f", {delayed:.0%} delayed" if delayed else "")


def _colour(task: Task, chunks: int) -> tuple[float, ...]:
    """That of its kind, the paler the later its chunk."""
    from matplotlib.colors import to_rgb

    white = PALER * task.chunk / max(1, chunks - 1)
    return tuple(white + (1 - white) * part for part in to_rgb(KINDS[task.kind].colour))


def _ink(task: Task) -> str:
    """The colour of a task's number."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(KINDS[task.kind].colour)
    return DARK if task.chunk or 0.3 * red + 0.59 * green + 0.11 * blue > HALFWAY else LIGHT


def _patch(name: str, **look: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=name, **look)


class Tip(NamedTuple):
    """A text, and where it is told: on which row, from when to when (s)."""

    stage: int
    start: float
    end: float
    text: str


def tips(panel: Panel) -> Iterator[Tip]:
    """One for every task and every gap between tasks."""
    for record in panel.trace.records:
        yield Tip(record.stage, record.start, record.end, _of_task(panel, record))
    for parts in _gaps(panel.idle):
        yield Tip(parts[0].stage, parts[0].start, parts[-1].end, _of_gap(panel, parts))


def _gaps(found: Sequence[Idle]) -> Iterator[list[Idle]]:
    """Idle times that follow one another without a task between them."""
    number, end, numbered = 0, None, []
    for idle in found:
        number += (idle.stage, idle.start) != end
        end = idle.stage, idle.end
        numbered.append((number, idle))
    for _, parts in groupby(numbered, key=lambda pair: pair[0]):
        yield [idle for _, idle in parts]


def _of_task(panel: Panel, record: TaskRecord) -> str:
    start = told(record.start - panel.trace.start)
    waited = record.start - record.ready
    lines = [f"{record.task} on stage {record.stage}: {told(record.end - record.start)} from {start} on"]
    sender = panel.trace.sender(record)
    if sender is not None and sender.stage != record.stage:
        ended = told(record.ready - sender.end)
        lines += [
            f"needed {sender.task} of stage {sender.stage}, which had ended {ended} before it was ready"
        ]
    if record.late:
        lines += [f"{told(record.late)} of that was injected"]
    if record.delayed:
        lines += [f"the last {told(record.delayed)} of it are an injected delay"]
    return "\n".join([*lines, f"ready {told(waited)} before it began"])


def _of_gap(panel: Panel, parts: Sequence[Idle]) -> str:
    first, last = parts[0], parts[-1]
    seconds, start = told(last.end - first.start), told(first.start - panel.trace.start)
    lines = [f"{told(part.seconds)}: {reason(part)}" for part in parts]
    return "\n".join([f"stage {first.stage} idle for {seconds} from {start} on", *lines])


def reason(idle: Idle) -> str:
    """Why a stage's device did nothing, as far as the trace knows."""
    task = idle.awaited
    source = "" if idle.source is None else f"{idle.source[1]} of stage {idle.source[0]}"
    waits = f"{task} waits for {source}" if source else f"{task} is not ready, though it needs no other stage"
    after = f", which waits for {source}" if source else ""
    return CAUSES[idle.cause].gap.format(task=task, source=source, waits=waits, after=after)


FORMATS = (".png", ".svg", ".pdf", ".html")

MOST_ROWS = 200
"""Stages of all panels together; beyond it nobody could read the picture."""

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

POINTS = 72
"""Per inch, as an SVG of matplotlib counts."""


class Timeline:
    """Steps, one panel each, stage by time. Hovering over a box tells a task, over a gap why it is idle."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        self.panels = tuple(panels)

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file; its name says the format.

        .svg and .html have what hovering tells (in browsers), .png and .pdf have not.

        Raises:
            UsageError: another format, too many stages, or no way to write there.
        """
        path = output_of("picture", path)
        check_picture(path, sum(panel.trace.stages for panel in self.panels))
        try:
            with written_whole(path) as part:
                match path.suffix.lower():
                    case ".svg":
                        part.write_text(self.svg(), encoding="utf-8")
                    case ".html":
                        page = f'<!doctype html>\n<meta charset="utf-8">\n<title>{path.stem}</title>\n'
                        part.write_text(page + self.svg(), encoding="utf-8")
                    case suffix:
                        figure(self.panels).savefig(part, format=suffix[1:])
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        return path

    def svg(self) -> str:
        """The picture as SVG text, in which hovering tells what `report/timeline.py` says."""
        from matplotlib import rc_context

        made, text = figure(self.panels), io.StringIO()
        with rc_context({"svg.fonttype": "none"}):  # words stay words
            made.savefig(text, format="svg")
        for prefix, name in (("", SVG), ("xlink", XLINK)):
            ElementTree.register_namespace(prefix, name)
        root = ElementTree.fromstring(text.getvalue())
        root.set("style", "max-width: 100%; height: auto; background: white")
        root.append(self._tips(made))
        return ElementTree.tostring(root, encoding="unicode")

    def _tips(self, made: Any) -> ElementTree.Element:
        """Rectangles that are seen by pointers only, each with its text, over the boxes and gaps."""
        over = ElementTree.Element(f"{{{SVG}}}g", {"fill": "none", "pointer-events": "all"})
        axis, height = TimeAxis.of(self.panels), made.get_figheight() * POINTS
        for axes, panel in zip(made.axes, self.panels, strict=True):
            for tip in tips(panel):
                start, width = axis.span(panel.trace, tip.start, tip.end)
                corners = [(start, tip.stage - THICK / 2), (start + width, tip.stage + THICK / 2)]
                (left, top), (right, bottom) = axes.transData.transform(corners) * POINTS / DPI
                place = {"x": left, "y": height - top, "width": right - left, "height": top - bottom}
                shape = {name: f"{value:.2f}" for name, value in place.items()}
                rectangle = ElementTree.SubElement(over, f"{{{SVG}}}rect", shape)
                ElementTree.SubElement(rectangle, f"{{{SVG}}}title").text = tip.text
        return over

    def __repr__(self) -> str:
        return f"Timeline({', '.join(panel.title for panel in self.panels)})"

    def _repr_html_(self) -> str:  # not as SVG, which JupyterLab shows as an image that hovering cannot enter
        return self.svg()


class HasTimeline(Protocol):
    """What can be drawn: the report of a step, or a simulation."""

    def timeline(self) -> Timeline:
        """Its picture."""


def compare(*drawn: HasTimeline | Timeline) -> Timeline:
    """Steps under one another on one time scale: reports of steps, simulations, or pictures of them.

    Raises:
        UsageError: something that has no picture, or nothing at all.
    """
    panels: list[Panel] = []
    for one in drawn:
        if not isinstance(one, Timeline) and not callable(getattr(one, "timeline", None)):
            raise UsageError(
                f"compare: {type(one).__name__} is no step; give the reports that a Trainer's steps have, or "
                f"what rrfp_jax.simulate returns"
            )
        panels += (one if isinstance(one, Timeline) else one.timeline()).panels
    if not panels:
        raise UsageError("compare: nothing is given; give two reports of steps")
    return Timeline(panels)


def check_picture(path: Path, rows: int) -> None:
    """Refuse a picture that could not be drawn, of so many rows of stages.

    Raises:
        UsageError: an unknown format, or too many stages.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends with {', '.join(FORMATS)}")
    if rows > MOST_ROWS:
        raise UsageError(f"{path}: {rows} rows of stages are too many to read; draw at most {MOST_ROWS}")
