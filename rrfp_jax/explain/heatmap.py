"""Who computes slower than the others: stage by replica, or stage by step where there is one replica.

As in ByteDance's SMon (arXiv:2505.05713), what would be ideal is the mean. A hot spot is a slow worker, a
stripe an uneven stage, a column a step of much data, and scatter is lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import altair as alt

from rrfp_jax.explain.plot import WIDTH, Plot, milliseconds, row_height, thinned
from rrfp_jax.trace.records import StepTrace


class Cell(NamedTuple):
    """How long a stage of a replica, or in a step, was busy (s), and how many times the mean that is."""

    stage: int
    column: int
    seconds: float
    slowdown: float


def slowdowns(traces: Sequence[StepTrace]) -> tuple[str, list[Cell]]:
    """What the columns are, "replica" or "step", and the cells.

    Args:
        traces: of steps, the latest last; with replicas, those count that have as many as the last one.
    """
    replicas = len(traces[-1].busy_by_replica)
    stages = range(traces[-1].stages)
    if replicas:
        alike = [trace.busy_by_replica for trace in traces if len(trace.busy_by_replica) == replicas]
        columns = [
            (r, [fmean(busy[r][stage] for busy in alike) for stage in stages]) for r in range(replicas)
        ]
    else:
        columns = [(trace.step, [trace.busy(stage) for stage in stages]) for trace in traces]
    mean = fmean(seconds for _, column in columns for seconds in column) or 1.0
    cells = [
        Cell(stage, number, seconds, seconds / mean)
        for number, column in columns
        for stage, seconds in enumerate(column)
    ]
    return ("replica" if replicas else "step"), cells


def heatmap(traces: Sequence[StepTrace]) -> Plot:
    """The cells, red where they are slower than the mean."""
    what, cells = slowdowns(traces)
    columns = len({cell.column for cell in cells})
    rows = [
        {"s": cell.stage, "c": cell.column, "x": round(cell.slowdown, 4), "ms": milliseconds(cell.seconds)}
        for cell in cells
    ]
    most = max(0.1, *(abs(cell.slowdown - 1) for cell in cells))  # small differences stay pale
    scale = alt.Scale(scheme="redblue", reverse=True, domain=[1 - min(most, 1), 1 + most], domainMid=1)
    chart = (
        alt.Chart(
            alt.NamedData("heatmap"),
            width=alt.Step(min(40, (WIDTH - 160) / columns)),
            height=alt.Step(row_height(traces[-1].stages)),
        )
        .mark_rect()
        .encode(
            x=alt.X("c:O", title=what, axis=thinned()),
            y=alt.Y("s:O", title="stage", axis=thinned()),
            color=alt.Color("x:Q", title="times the mean", scale=scale),
            tooltip=[
                alt.Tooltip("s:O", title="stage"),
                alt.Tooltip("c:O", title=what),
                alt.Tooltip("x:Q", title="times the mean", format=".2f"),
                alt.Tooltip("ms:Q", title="ms busy"),
            ],
        )
    )
    return Plot(chart, {"heatmap": rows})


def slowest(traces: Sequence[StepTrace]) -> str:
    """The slowest cell in words."""
    what, cells = slowdowns(traces)
    cell = max(cells, key=lambda cell: cell.slowdown)
    where = f"of replica {cell.column}" if what == "replica" else f"in step {cell.column}"
    return f"Busy longest: stage {cell.stage} {where}, {cell.slowdown:.2f} times the mean."
