"""A step as a picture that notebooks show, and that can be saved."""

from __future__ import annotations

from pathlib import Path

from rrfp_jax.core.measure.trace import StepTrace
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of
from rrfp_jax.views.picture import draw, svg_with_tips


class Timeline:
    """A `StepTrace`, stage by time. Hovering over a box tells the task and its times."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file; its name says the format: .svg (with what hovering tells), .png, .pdf.

        Raises:
            UsageError: another format, too many stages, or no way to write there.
        """
        path = path_of("picture", path)
        if path.suffix.lower() != ".svg":
            draw({self._title: self._trace}, path)
            return path
        try:
            path.write_text(self.svg(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        return path

    def svg(self) -> str:
        """The picture as SVG text."""
        return svg_with_tips({self._title: self._trace})

    def __repr__(self) -> str:
        return f"Timeline(step {self._trace.step}, {self._trace.makespan * 1e3:.1f} ms)"

    def _repr_svg_(self) -> str:
        return self.svg()

    @property
    def _title(self) -> str:
        return f"step {self._trace.step}"
