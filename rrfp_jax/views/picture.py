"""Steps as a picture for slides: one panel per schedule above a common time axis, one row per stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rrfp_jax.core.measure.trace import StepTrace
from rrfp_jax.errors import UsageError
from rrfp_jax.views.timeline import COLOURS, IDLE_COLOUR, NAMES

FORMATS = (".png", ".svg", ".pdf")

WIDTH, DPI = 12.0, 160
"""Of the picture in inches, and its pixels per inch."""

ROW, PANEL, FOOT = 0.32, 0.42, 0.75
"""Heights in inches: of a stage, of a panel's title and space, of axis and legend."""

MOST_ROWS = 200
"""Stages of all panels together; beyond it nobody could read the picture."""

LABEL_POINTS = 6.0
LABEL_WIDTH = 0.055
"""Size of a task's name, and the inches that one of its letters needs."""


def check_picture(path: Path, rows: int) -> None:
    """Refuse a picture that could not be drawn, of so many rows of stages.

    Raises:
        UsageError: an unknown format, or too many stages.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends with {', '.join(FORMATS)}")
    if rows > MOST_ROWS:
        raise UsageError(f"{path}: {rows} rows of stages are too many to read; draw at most {MOST_ROWS}")


def draw(steps: Mapping[str, StepTrace], path: Path) -> None:
    """Draw steps by their titles into a file; dark seams part tasks, grey is idle time.

    Raises:
        UsageError: an unknown format, too many stages, or no way to write there.
    """
    check_picture(path, sum(step.stages for step in steps.values()))
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [ROW * step.stages + PANEL for step in steps.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + FOOT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(step.makespan for step in steps.values()) or 1.0  # of steps that take no time
    scale, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    for axes, (title, step) in zip(panels, steps.items(), strict=True):
        _panel(axes, title, step, longest, scale, unit)
    panels[-1].set_xlabel(f"time ({unit})", fontsize=9)
    present = {record.task.kind for step in steps.values() for record in step.records}
    figure.legend(
        handles=[_patch(COLOURS[kind], NAMES[kind]) for kind in sorted(present)]
        + [_patch(IDLE_COLOUR, "idle")],
        loc="outside lower right",
        ncols=len(present) + 1,
        fontsize=9,
        frameon=False,
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def _panel(axes: Any, title: str, step: StepTrace, longest: float, scale: float, unit: str) -> None:
    """One step; all panels share the time axis."""
    for stage in range(step.stages):
        records = step.stage_records(stage)
        axes.broken_barh(
            [(0, step.makespan * scale)], (stage - 0.42, 0.84), facecolor=IDLE_COLOUR, linewidth=0
        )
        spans = [((r.start - step.start) * scale, (r.end - r.start) * scale) for r in records]
        colours = [COLOURS[record.task.kind] for record in records]
        axes.broken_barh(spans, (stage - 0.42, 0.84), facecolors=colours, edgecolor="white", linewidth=0.3)
        for (start, width), record in zip(spans, records, strict=True):
            label = str(record.task)
            if width / (longest * scale) * WIDTH * 0.9 > LABEL_WIDTH * len(label):
                middle = (start + width / 2, stage)
                axes.annotate(label, middle, ha="center", va="center", color="white", fontsize=LABEL_POINTS)
    bubble = sum(step.bubble()) / step.stages
    axes.set_title(
        f"{title}: {step.makespan * scale:.4g} {unit}, {bubble:.0%} idle",
        loc="left",
        fontsize=10,
        weight="bold",
    )
    axes.set_xlim(0, longest * scale)
    axes.set_ylim(step.stages - 0.5, -0.5)
    axes.set_yticks(range(step.stages), [f"stage {stage}" for stage in range(step.stages)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _patch(colour: str, text: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=text)
