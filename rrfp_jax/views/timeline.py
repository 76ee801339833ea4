"""A step as a picture: one row per stage, one box per task, time from left to right. Plain SVG."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rrfp_jax.core.measure.trace import StepTrace
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT

WIDTH, ROW, LEFT, TOP = 960, 34, 70, 26
COLOURS = {FORWARD: "#4c8eda", BACKWARD: "#e08e45", INPUT: "#f0b76b", WEIGHT: "#6aa84f"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}
IDLE_COLOUR = "#e9e9e9"


class Timeline:
    """Draws a `StepTrace`. Hovering over a box tells the task and its times."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def save(self, path: str | Path) -> Path:
        """Write the picture as an SVG file."""
        path = Path(path)
        path.write_text(self.svg(), encoding="utf-8")
        return path

    def svg(self) -> str:
        """The picture as SVG text."""
        trace, height = self._trace, TOP + ROW * self._trace.stages + 22
        scale = (WIDTH - LEFT - 10) / max(trace.makespan, 1e-9)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="sans-serif" font-size="11" style="max-width:{WIDTH}px;background:white">',
            f'<text x="{LEFT}" y="16">step {trace.step}: {trace.makespan * 1e3:.1f} ms</text>',
            *self._legend(),
        ]
        for stage, bubble in enumerate(trace.bubble()):
            y = TOP + ROW * stage
            parts.append(f'<text x="4" y="{y + 14}">stage {stage}</text>')
            parts.append(f'<text x="4" y="{y + 26}" fill="#777">idle {bubble:.0%}</text>')
            parts.append(self._box(LEFT, y, WIDTH - LEFT - 10, IDLE_COLOUR, f"stage {stage}, idle", ""))
            for record in trace.stage_records(stage):
                x, width = LEFT + (record.start - trace.start) * scale, (record.end - record.start) * scale
                colour = COLOURS[record.task.kind]
                begin, seconds = record.start - trace.start, record.end - record.start
                tip = (
                    f"{record.task} on stage {stage}: {seconds * 1e3:.2f} ms from {begin * 1e3:.2f} ms on; "
                    f"ready {1e3 * (record.start - record.ready):.2f} ms before"
                )
                parts.append(self._box(x, y, width, colour, tip, str(record.task)))
        axis = TOP + ROW * trace.stages + 14
        parts.append(f'<text x="{LEFT}" y="{axis}" fill="#777">0</text>')
        end = f"{trace.makespan * 1e3:.1f} ms"
        parts.append(f'<text x="{WIDTH - 10}" y="{axis}" fill="#777" text-anchor="end">{end}</text>')
        return "\n".join([*parts, "</svg>"])

    def __repr__(self) -> str:
        return f"Timeline(step {self._trace.step}, {self._trace.makespan * 1e3:.1f} ms)"

    def _repr_svg_(self) -> str:
        return self.svg()

    @staticmethod
    def _legend() -> list[str]:
        items = [(COLOURS[FORWARD], "forward"), (COLOURS[BACKWARD], "backward"), (IDLE_COLOUR, "idle")]
        legend = []
        for i, (colour, text) in enumerate(items):
            x = WIDTH - 240 + 80 * i
            legend.append(f'<rect x="{x}" y="7" width="10" height="10" fill="{colour}"/>')
            legend.append(f'<text x="{x + 14}" y="16">{text}</text>')
        return legend

    @staticmethod
    def _box(x: float, y: float, width: float, colour: str, tip: str, label: str) -> str:
        text = ""
        if label and width > 7 * len(label):
            middle = f'x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle" fill="white"'
            text = f"<text {middle}>{label}</text>"
        return (
            f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" '
            f'height="{ROW - 6}" fill="{colour}" stroke="white" stroke-width="0.4"/>{text}</g>'
        )
