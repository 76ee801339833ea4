"""The picture of step time against bytes: one curve a hint, one point a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Protocol


class Timed(Protocol):
    """A kind of step with one limit: times by schedule, and bytes over those of 1F1B."""

    @property
    def factor(self) -> float:
        """Of the limit over the bytes of 1F1B."""

    @property
    def times(self) -> Mapping[str, float]:
        """Of what fits, over one schedule's."""

    @property
    def bytes(self) -> Mapping[str, float]:
        """Of everything."""


def plot(rows: Sequence[Timed], fixed: Sequence[str], hints: Sequence[str], path: Path) -> None:
    """Geometric means over all kinds of steps; a schedule is drawn where it can run in all of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    factors = sorted({row.factor for row in rows})
    for name in hints:
        means = {factor: _mean([row for row in rows if row.factor == factor], name) for factor in factors}
        points = [(factor, mean) for factor, mean in means.items() if mean is not None]
        axes.plot(*zip(*points, strict=True), label=name, marker="o", markersize=3, linewidth=2)
    widest = [row for row in rows if row.factor == factors[-1]]
    for name in fixed:
        if (mean := _mean(widest, name)) is not None:
            held = median(row.bytes[name] for row in widest)
            axes.plot([held], [mean], "s", color="#444444", markersize=5)
            axes.annotate(f" {name}", (held, mean), fontsize=8, va="bottom", color="#444444")
    axes.set_xlabel("bytes a stage may hold, over those of 1F1B")
    axes.set_ylabel("step time over strict ZB-V's")
    title = f"Geometric means over {len(widest)} kinds of steps; squares are followed strictly"
    axes.set_title(title, fontsize=11)
    axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def _mean(rows: Sequence[Timed], name: str) -> float | None:
    times = [row.times.get(name) for row in rows]
    known = [time for time in times if time is not None]
    return geometric_mean(known) if len(known) == len(times) else None
