"""Steps as a picture that notebooks show, and that can be saved."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import output_of
from rrfp_jax.files import written_whole
from rrfp_jax.views.picture import DPI, THICK, Panel, TimeAxis, figure, tips

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
        """The picture as SVG text, in which hovering tells what `views/picture.py` says."""
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
