"""How long the steps of a run took, from its first to its last, and what changed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

import altair as alt

from rrfp_jax.explain.plot import WIDTH, Plot, Row, milliseconds
from rrfp_jax.explain.run_folder import StepLine

MOST_POINTS = 600
"""Of longer runs the median of so many steps in a row is drawn, and their longest."""

MOST_MARKS = 60
"""Of what changed, the latest."""

MOST_MEDIANS = 4.0
"""Times the median; what took longer, such as a step that compiled, is drawn at the edge."""

RATE_CHANGE = 2.0
"""By which factor a learning rate must differ from where it was last marked to be marked again."""


def history(runs: Mapping[str, Sequence[StepLine]]) -> Plot:
    """Lines of runs by their names, on the same axes, with a mark wherever something changed.

    Args:
        runs: all their steps, at least one each.
    """
    rows = [row for run, lines in runs.items() for row in _rows(run, lines, len(runs) > 1)]
    marks = [
        {"step": step, "what": f"{run}: {what}" if len(runs) > 1 else what}
        for run, lines in runs.items()
        for step, what in changes(lines)[-MOST_MARKS:]
    ]
    last = max(lines[-1].step for lines in runs.values())
    usual = median(line.wall_seconds for lines in runs.values() for line in lines)
    longest = max(line.wall_seconds for lines in runs.values() for line in lines)
    top = milliseconds(min(longest, MOST_MEDIANS * usual))
    x = alt.X("step:Q", scale=alt.Scale(domain=[0, max(last, 1)], nice=False), axis=alt.Axis(tickMinStep=1))
    lines = (
        alt.Chart(alt.NamedData("history"))
        .mark_line(point=len(rows) <= 120)
        .encode(
            x=x,
            y=alt.Y("ms:Q", title="ms", scale=alt.Scale(domain=[0, top], clamp=True)),
            color=alt.Color("what:N", title=None, sort=None),
            tooltip=["step:Q", "what:N", "ms:Q"],
        )
    )
    rules = (
        alt.Chart(alt.NamedData("changes"))
        .mark_rule(strokeDash=[4, 3], color="#555555", strokeWidth=2)
        .encode(x=x, tooltip=["step:Q", alt.Tooltip("what:N", title="changed")])
    )
    chart = alt.layer(rules, lines).properties(width=WIDTH - 160, height=200)
    return Plot(chart, {"history": rows, "changes": marks})


def changes(lines: Sequence[StepLine]) -> list[tuple[int, str]]:
    """What changed in a run, by step: schedule, learning rate, restarts, and updates that were left out."""
    found: list[tuple[int, str]] = []
    marked = _rate(lines[0])
    for before, line in pairwise(lines):
        if line.resumed:
            found.append((line.step, "the run was started again"))
        if line.schedule != before.schedule:
            found.append((line.step, f"schedule {before.schedule} -> {line.schedule}"))
        if not line.applied:
            found.append((line.step, "the update was left out: not finite"))
        rate = _rate(line)
        if rate is not None and not _alike(rate, marked):
            found.append((line.step, f"learning rate {rate:.3g}"))
            marked = rate
    return found


def _rate(line: StepLine) -> float | None:
    rates = [own for name, own in line.hyperparams.items() if name.endswith("learning_rate")]
    return rates[0] if rates else None


def _alike(rate: float, marked: float | None) -> bool:
    if marked is None:
        return False
    low, high = sorted((abs(rate), abs(marked)))
    return high <= RATE_CHANGE * low


def _rows(run: str, lines: Sequence[StepLine], several: bool) -> Iterator[Row]:
    """Of several runs only whole steps; of one run also what of them tasks and data took."""
    size = -(-len(lines) // MOST_POINTS) or 1
    for first in range(0, len(lines), size):
        own = lines[first : first + size]
        whole = [line.wall_seconds for line in own]
        figures = {run if several else "whole step": median(whole)}
        if size > 1 and not several:
            figures[f"the longest of {size}"] = max(whole)
        if not several:
            figures["its tasks"] = median(line.step_seconds for line in own)
            if any(line.load_seconds > 0.01 * line.wall_seconds for line in lines):
                figures["waiting for data"] = median(line.load_seconds for line in own)
        for what, seconds in figures.items():
            yield {"step": own[0].step, "what": what, "ms": milliseconds(seconds)}
