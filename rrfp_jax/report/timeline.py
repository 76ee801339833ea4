"""Steps as pictures: one panel per step above a common time axis, one row per stage, one box per task.

All pictures of steps are drawn alike, real ones and simulated ones; what has no strong colour is idle.
Hovering over a task tells its times, over an idle stage what it waited for.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import output_of
from rrfp_jax.json_files import write_output
from rrfp_jax.report.legend import CAUSES
from rrfp_jax.trace.idleness import Cause, Idle, idleness
from rrfp_jax.trace.records import RecordedStep, StepTrace, TaskRecord

FORMATS = (".png", ".svg", ".pdf", ".html")

MOST_ROWS = 200
"""Stages of all panels together; beyond it nobody could read the picture."""

LEAST_SHARE = 0.01
"""Of the step; what is waited for less is left out of the title."""

PIXELS = 1.6
"""Of a .png, for each unit of length of the others."""

MISSING = 'pictures need altair and vl-convert: pip install "PATH-TO-CHECKOUT[pictures]"'


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
    def heading(self) -> str:
        """What it is, how long it takes, and the mean share that is not computed."""
        trace, bubble = self.trace, self.trace.bubble()
        delayed = sum(trace.delayed(stage) for stage in range(trace.stages)) / (trace.makespan or 1.0)
        idle = _not_computed(sum(bubble) / trace.stages, delayed / trace.stages)
        return f"{self.title}: {told(trace.makespan)}, {idle}"

    @property
    def causes(self) -> str:
        """Mean shares of the step by cause of idleness, the largest first; "" if there is no idleness."""
        whole = self.trace.makespan * self.trace.stages
        found: dict[Cause, float] = dict.fromkeys(Cause, 0.0)
        for idle in self.idle:
            found[idle.cause] += idle.seconds / whole
        shown = [(share, cause) for cause, share in found.items() if share > LEAST_SHARE]
        return ", ".join(f"{CAUSES[cause].title} {share:.0%}" for share, cause in sorted(shown, reverse=True))

    @property
    def rows(self) -> list[str]:
        """The names of its rows."""
        trace, whole = self.trace, self.trace.makespan or 1.0
        shares = [(idle, trace.delayed(stage) / whole) for stage, idle in enumerate(trace.bubble())]
        return [f"stage {stage}, {_not_computed(*own)}" for stage, own in enumerate(shares)]


def _not_computed(idle: float, delayed: float) -> str:
    return f"{idle:.0%} idle" + (f", {delayed:.0%} delayed" if delayed else "")


class Timeline:
    """Steps, one panel each, stage by time. Hovering over a box tells a task, over a gap why it is idle."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        self.panels = tuple(panels)

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file; its name says the format.

        .svg and .html have what hovering tells (in browsers), .png and .pdf have not.

        Raises:
            UsageError: another format, too many stages, no way to write there, or nothing to draw with.
        """
        path = output_of("picture", path)
        check_picture(path, sum(panel.trace.stages for panel in self.panels))
        write_output(path, self._drawn(path.suffix.lower(), path.stem))
        return path

    def svg(self) -> str:
        """The picture as SVG text, in which hovering tells of tasks and gaps."""
        return self._drawn(".svg", "").decode()

    def _drawn(self, form: str, title: str) -> bytes:
        try:
            import vl_convert

            from rrfp_jax.report.charts import picture
        except ModuleNotFoundError:
            raise UsageError(MISSING) from None
        spec = picture(self.panels).spec()
        if form in (".png", ".pdf"):
            options = {"scale": PIXELS} if form == ".png" else {}
            return bytes(getattr(vl_convert, f"vegalite_to_{form[1:]}")(spec, **options))
        svg = vl_convert.vegalite_to_svg(spec)
        # What the pictures' marks are described by becomes what hovering shows.
        svg = re.sub(r'<path aria-label="([^"]*)"([^>]*)/>', r"<path\2><title>\1</title></path>", svg)
        svg = svg.replace("<svg ", '<svg style="max-width: 100%; height: auto; background: white" ', 1)
        head = f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        return f"{head if form == '.html' else ''}{svg}".encode()

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
            remedy = "give the reports that a Trainer's steps have, or what rrfp_jax.simulate returns"
            raise UsageError(f"compare: {type(one).__name__} is no step; {remedy}")
        panels += (one if isinstance(one, Timeline) else one.timeline()).panels
    if not panels:
        raise UsageError("compare: nothing is given; give two reports of steps")
    return Timeline(panels)


def can_draw() -> bool:
    """Whether the packages that draw are installed."""
    return find_spec("altair") is not None and find_spec("vl_convert") is not None


def check_picture(path: Path, rows: int) -> None:
    """Refuse a picture that could not be drawn, of so many rows of stages.

    Raises:
        UsageError: an unknown format, too many stages, or the packages that draw are not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends with {', '.join(FORMATS)}")
    if rows > MOST_ROWS:
        raise UsageError(f"{path}: {rows} rows of stages are too many to read; draw at most {MOST_ROWS}")
    if not can_draw():
        raise UsageError(f"{path}: {MISSING}")


def told(seconds: float) -> str:
    """A duration in a unit that suits it."""
    scale, unit = unit_of(seconds)
    return f"{seconds * scale:.4g} {unit}"


def unit_of(seconds: float) -> tuple[float, str]:
    """How many of a unit make a second, and its name."""
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
    return next((one for one in units if seconds * one[0] >= 1), units[1 if seconds <= 0 else 2])


def gaps_of(panel: Panel) -> list[list[Idle]]:
    """Idle times that follow one another without a task between them."""
    gaps: list[list[Idle]] = []
    for idle in panel.idle:
        if gaps and (gaps[-1][-1].stage, gaps[-1][-1].end) == (idle.stage, idle.start):
            gaps[-1].append(idle)
        else:
            gaps.append([idle])
    return gaps


def of_task(panel: Panel, record: TaskRecord) -> str:
    """What hovering tells over a task."""
    start = told(record.start - panel.trace.start)
    lines = [f"{record.task} on stage {record.stage}: {told(record.end - record.start)} from {start} on"]
    sender = panel.trace.sender(record)
    if sender is not None and sender.stage != record.stage:
        ago = told(record.ready - sender.end)
        lines += [f"needed {sender.task} of stage {sender.stage}, which had ended {ago} before it was ready"]
    if record.late:
        lines += [f"{told(record.late)} of that was injected"]
    if record.delayed:
        lines += [f"the last {told(record.delayed)} of it are an injected delay"]
    return "\n".join([*lines, f"ready {told(record.start - record.ready)} before it began"])


def of_gap(panel: Panel, parts: Sequence[Idle]) -> str:
    """What hovering tells over an idle time of several parts."""
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
