"""Pictures of results, drawn with `--write`; a layer is one of Vega-Lite, its fields all of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
Draw = Callable[[Path], None]
Row = Mapping[str, object]
Spec = dict[str, Any]


def _layer(rows: Sequence[Row], mark: str, look: Spec, encoding: Spec) -> Spec:
    values = [dict(row) for row in rows]
    return {"data": {"values": values}, "mark": {"type": mark, **look}, "encoding": encoding}


def _saved(layers: Sequence[Spec], height: int = 360, title: str = "") -> Draw:
    look = {"view": {"stroke": None}, "range": {"category": list(COLORS)}}
    spec = {"layer": layers, "width": 560, "height": height, "title": title, "config": look}

    def draw(path: Path) -> None:
        import altair as alt

        alt.LayerChart.from_dict(spec).save(path)

    return draw


def _named(field: str = "name") -> Spec:
    return {"color": {"field": field, "type": "nominal", "title": None, "sort": None}}


def curves(lines: Sequence[Row], points: Sequence[Row], title: str) -> Draw:
    """Step time against bytes: rows of `x`, `y` and `name`; a curve a hint, a named point a fixed order."""
    x: Spec = {"type": "quantitative", "scale": {"zero": False}}
    places = {
        "x": {"field": "x", "title": "bytes a stage may hold, over those of 1F1B", **x},
        "y": {"field": "y", "title": "step time over strict ZB-V's", **x},
    }
    gray = {"color": "#444444"}
    text = places | {"text": {"field": "name", "type": "nominal"}}
    return _saved(
        [
            _layer(lines, "line", {"point": True}, places | _named()),
            _layer(points, "square", gray | {"size": 50}, places),
            _layer(points, "text", gray | {"align": "left", "dx": 6}, text),
        ],
        title=title,
    )


def simulated_against(
    ran: str, points: Mapping[str, Sequence[tuple[float, float, bool]]], title: str, within: float
) -> Draw:
    """(What ran, simulated, whether it is filled) in seconds by kind, on logarithmic axes; dotted lines where
    they are apart by the share `within`."""
    rows = [{"x": x, "y": y, "name": name, "fill": f} for name, own in points.items() for x, y, f in own]
    both = [place for own in points.values() for *pair, _ in own for place in pair]
    ends = [min(both) / 1.1, max(both) * 1.1]
    factors = 1.0, 1 + within, 1 / (1 + within)
    lines = [{"x": end, "y": end * factor, "factor": factor} for factor in factors for end in ends]
    scale: Spec = {"type": "quantitative", "scale": {"type": "log", "domain": ends, "clamp": True}}
    places = {
        "x": {"field": "x", "title": f"{ran}, s", **scale},
        "y": {"field": "y", "title": "simulated, s", **scale},
    }
    dashes = {
        "detail": {"field": "factor", "type": "nominal"},
        "strokeDash": {"condition": {"test": "datum.factor == 1", "value": [1, 0]}, "value": [2, 3]},
    }
    fills = {
        "fill": {"field": "name", "type": "nominal", "legend": None, "sort": None},
        "fillOpacity": {"condition": {"test": "datum.fill", "value": 1}, "value": 0},
    }
    return _saved(
        [
            _layer(lines, "line", {"color": "#888888", "strokeWidth": 0.8}, places | dashes),
            _layer(rows, "point", {}, places | _named() | fills),
        ],
        title=f"{title}dotted: {within:.0%}",
    )


def bars(rows: Sequence[Row], label: str, start: float = 0.0) -> Draw:
    """A bar from `start` to each row's `value`, or several stacked by `part`; rows have a `name`."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    shown = [{**row, "value": float(str(row["value"])) - start} for row in rows]
    axis = {"labelExpr": f"format(datum.value + {start}, '.2f')"}
    x = {"field": "value", "type": "quantitative", "title": label, "axis": axis}
    y = {"field": "name", "type": "nominal", "sort": names, "title": None, "axis": {"labelLimit": 300}}
    return _saved([_layer(shown, "bar", {}, {"x": x, "y": y} | _named("part"))], height=22 * len(names))
