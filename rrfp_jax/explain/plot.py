"""A chart apart from its rows, and the colours of all charts of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import altair as alt

from rrfp_jax.trace.idleness import CAUSES

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
