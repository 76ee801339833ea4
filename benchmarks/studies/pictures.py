"""The pictures of `results/proof.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


Points = Sequence[tuple[float, float, bool]]
"""(what ran, simulated, whether it is filled), both in seconds."""


def simulated_against(ran: str, points: Mapping[str, Points], title: str, within: float, path: Path) -> None:
    """Seconds by kind, on logarithmic axes; dotted lines where they are apart by the share `within`."""
    figure, axes = _figure(6.5, 5.5)
    for (name, own), color in zip(points.items(), COLORS, strict=False):
        for filled in (True, False):
            some = [(x, y) for x, y, fill in own if fill == filled]
            face = color if filled else "none"
            x, y = [x for x, _ in some], [y for _, y in some]
            axes.scatter(x, y, s=28, edgecolors=color, facecolors=face, label=name if filled else None)
    both = [x for own in points.values() for *place, _ in own for x in place]
    ends = (min(both) / 1.1, max(both) * 1.1)
    for factor, style in ((1.0, "-"), (1 + within, ":"), (1 / (1 + within), ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="#888888", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel(f"{ran}, s")
    axes.set_ylabel("simulated, s")
    axes.set_title(f"{title}dotted: {within:.0%}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def stacked(rows: Mapping[str, Sequence[float]], parts: Sequence[str], label: str, path: Path) -> None:
    """A bar of parts for each row; a negative part begins at zero and goes left."""
    figure, axes = _figure(8, 0.32 * len(rows) + 1.2)
    names = list(rows)[::-1]
    right, left = [0.0] * len(names), [0.0] * len(names)
    for place, (part, color) in enumerate(zip(parts, COLORS, strict=False)):
        sizes = [rows[name][place] for name in names]
        begins = [right[i] if size >= 0 else left[i] for i, size in enumerate(sizes)]
        axes.barh(names, sizes, left=begins, color=color, label=part)
        right = [at + max(size, 0.0) for at, size in zip(right, sizes, strict=True)]
        left = [at + min(size, 0.0) for at, size in zip(left, sizes, strict=True)]
    axes.axvline(0.0, color="#444444", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(label)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def ratios(rows: Mapping[str, tuple[float, bool]], label: str, path: Path) -> None:
    """A bar for each row from 1 to its ratio; those that are marked in the first colour."""
    figure, axes = _figure(8, 0.26 * len(rows) + 1.0)
    names = list(rows)[::-1]
    sizes = [rows[name][0] - 1 for name in names]
    axes.barh(names, sizes, left=1.0, color=[COLORS[0] if rows[name][1] else "#aaaaaa" for name in names])
    axes.axvline(1.0, color="#444444", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(label)
    figure.savefig(path)
