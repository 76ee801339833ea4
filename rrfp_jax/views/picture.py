"""Steps as a picture: one panel per step above a common time axis, one row per stage, one box per task."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rrfp_jax.core.measure.trace import StepTrace, TaskRecord
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of

COLOURS = {FORWARD: "#4c8eda", BACKWARD: "#e08e45", INPUT: "#f0b76b", WEIGHT: "#6aa84f"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}
IDLE_COLOUR = "#e9e9e9"

FORMATS = (".png", ".svg", ".pdf")

WIDTH, DPI = 12.0, 160
"""Of the picture in inches, and its pixels per inch."""

ROW, PANEL, FOOT = 0.32, 0.42, 0.75
"""Heights in inches: of a stage, of a panel's title and space, of axis and legend."""

THICK = 0.84
"""Of a box, as a share of its row."""

MOST_ROWS = 200
"""Stages of all panels together; beyond it nobody could read the picture."""

LABEL_POINTS = 6.0
LABEL_WIDTH = 0.055
"""Size of a task's name, and the inches that one of its letters needs."""

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def check_picture(path: Path, rows: int) -> None:
    """Refuse a picture that could not be drawn, of so many rows of stages.

    Raises:
        UsageError: an unknown format, or too many stages.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends with {', '.join(FORMATS)}")
    if rows > MOST_ROWS:
        raise UsageError(f"{path}: {rows} rows of stages are too many to read; draw at most {MOST_ROWS}")


def draw(steps: Mapping[str, StepTrace], path: str | Path) -> None:
    """Draw steps by their titles into a file; light seams part tasks, grey is idle time.

    Raises:
        UsageError: an unknown format, too many stages, or no way to write there.
    """
    path = path_of("picture", path)
    check_picture(path, sum(step.stages for step in steps.values()))
    try:
        _figure(steps, _TimeAxis.of(steps)).savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def svg_with_tips(steps: Mapping[str, StepTrace]) -> str:
    """The same as SVG text, in which hovering over a box tells the task and its times."""
    from matplotlib import rc_context
    from matplotlib.patches import Rectangle

    axis, text = _TimeAxis.of(steps), io.StringIO()
    figure, tips = _figure(steps, axis), dict[str, str]()
    for axes, step in zip(figure.axes, steps.values(), strict=True):
        for record in step.records:  # an invisible box over each, for a tip belongs to one box
            start, width = axis.span(step, record)
            name = f"tip-{len(tips)}"
            axes.add_patch(Rectangle((start, record.stage - THICK / 2), width, THICK, alpha=0, gid=name))
            tips[name] = _tip(step, record)
    with rc_context({"svg.fonttype": "none"}):  # words stay words
        figure.savefig(text, format="svg")
    for prefix, name in (("", SVG), ("xlink", XLINK)):
        ElementTree.register_namespace(prefix, name)
    root = ElementTree.fromstring(text.getvalue())
    for group in root.iter(f"{{{SVG}}}g"):
        if (tip := tips.get(group.get("id", ""))) is not None:
            title = ElementTree.Element(f"{{{SVG}}}title")
            title.text = tip
            group.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


@dataclass(frozen=True)
class _TimeAxis:
    """Common to all panels: the longest step in seconds, units per second, and the unit."""

    longest: float
    scale: float
    unit: str

    @classmethod
    def of(cls, steps: Mapping[str, StepTrace]) -> _TimeAxis:
        longest = max(step.makespan for step in steps.values()) or 1.0  # of steps that take no time
        return cls(longest, 1e3, "ms") if longest < 1 else cls(longest, 1.0, "s")

    def span(self, step: StepTrace, record: TaskRecord) -> tuple[float, float]:
        """Where a task begins, and its width."""
        return (record.start - step.start) * self.scale, (record.end - record.start) * self.scale


def _figure(steps: Mapping[str, StepTrace], axis: _TimeAxis) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [ROW * step.stages + PANEL for step in steps.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + FOOT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, step) in zip(panels, steps.items(), strict=True):
        _panel(axes, title, step, axis)
    panels[-1].set_xlabel(f"time ({axis.unit})", fontsize=9)
    present = {record.task.kind for step in steps.values() for record in step.records}
    figure.legend(
        handles=[_patch(COLOURS[kind], NAMES[kind]) for kind in sorted(present)]
        + [_patch(IDLE_COLOUR, "idle")],
        loc="outside lower right",
        ncols=len(present) + 1,
        fontsize=9,
        frameon=False,
    )
    return figure


def _panel(axes: Any, title: str, step: StepTrace, axis: _TimeAxis) -> None:
    """One step."""
    bubble, end = step.bubble(), axis.longest * axis.scale
    for stage in range(step.stages):
        records, row = step.stage_records(stage), (stage - THICK / 2, THICK)
        axes.broken_barh([(0, step.makespan * axis.scale)], row, facecolor=IDLE_COLOUR, linewidth=0)
        spans = [axis.span(step, record) for record in records]
        colours = [COLOURS[record.task.kind] for record in records]
        axes.broken_barh(spans, row, facecolors=colours, edgecolor="white", linewidth=0.3)
        for (start, width), record in zip(spans, records, strict=True):
            label = str(record.task)
            if width / end * WIDTH * 0.9 > LABEL_WIDTH * len(label):
                middle = (start + width / 2, stage)
                axes.annotate(label, middle, ha="center", va="center", color="white", fontsize=LABEL_POINTS)
    axes.set_title(
        f"{title}: {step.makespan * axis.scale:.4g} {axis.unit}, {sum(bubble) / step.stages:.0%} idle",
        loc="left",
        fontsize=10,
        weight="bold",
    )
    axes.set_xlim(0, end)
    axes.set_ylim(step.stages - 0.5, -0.5)
    rows = [f"stage {stage}, {idle:.0%} idle" for stage, idle in enumerate(bubble)]
    axes.set_yticks(range(step.stages), rows, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _tip(step: StepTrace, record: TaskRecord) -> str:
    begin, seconds, waited = record.start - step.start, record.end - record.start, record.start - record.ready
    return (
        f"{record.task} on stage {record.stage}: {seconds * 1e3:.2f} ms from {begin * 1e3:.2f} ms on; "
        f"ready {waited * 1e3:.2f} ms before"
    )


def _patch(colour: str, text: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=text)
