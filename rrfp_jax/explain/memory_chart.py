"""What stages held during a step, against what they might: in bytes with budgets, else in microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import altair as alt

from rrfp_jax.core.step_rules import charges_of
from rrfp_jax.core.tasks import KINDS
from rrfp_jax.explain.charts import WIDTH, Plot, Row, milliseconds, row_height, thinned
from rrfp_jax.trace.records import RecordedStep

MOST_CELLS = 20_000
MOST_TIMES = 250
"""Into which the step is divided; fewer where there are many stages."""


class Held(NamedTuple):
    """What a stage was charged, from each of some times on (s), and what it might be; None for no limit."""

    stage: int
    since: list[tuple[float, int]]
    limit: int | None
    in_bytes: bool

    @property
    def peak(self) -> int:
        """The most."""
        return max(amount for _, amount in self.since)


def held(step: RecordedStep) -> list[Held]:
    """Of each stage of a step with backward: an F takes what the chunk's B or W gives back, by dispatches."""
    found = []
    for stage in range(step.trace.stages):
        budget = step.budgets[stage] if step.budgets else None
        charges = charges_of(step.rules, budget)
        costs, limit = charges[0] if budget is None else charges[1]
        amount, since = 0, [(step.trace.start, 0)]
        for record in sorted(step.trace.stage_records(stage), key=lambda record: record.dispatched):
            kind, chunk, microbatch = record.task
            if charge := KINDS[kind].charge:
                amount += charge * costs[chunk][microbatch]
                since.append((record.dispatched, amount))
        found.append(Held(stage, since, limit, budget is not None))
    return found


def memory(step: RecordedStep) -> Plot:
    """Stage by time, the darker the more of its limit a stage holds; without limits, of the most of any."""
    stages = held(step)
    most = max(own.peak for own in stages) or 1
    times = max(1, min(MOST_TIMES, MOST_CELLS // len(stages)))
    rows = [row for own in stages for row in _rows(step, own, most, times)]
    span = milliseconds(step.trace.makespan)
    title = "of its limit" if stages[0].limit is not None else "of the most"
    scale = alt.Scale(scheme="yelloworangered", domain=[0, 1])
    chart = (
        alt.Chart(alt.NamedData("memory"), width=WIDTH - 120, height=alt.Step(row_height(len(stages))))
        .mark_rect()
        .encode(
            x=alt.X("a:Q", title="ms", scale=alt.Scale(domain=[0, span])),
            x2="b:Q",
            y=alt.Y("s:O", title="stage", axis=thinned()),
            color=alt.Color("x:Q", title=title, scale=scale, legend=alt.Legend(format="%")),
            tooltip=[
                alt.Tooltip("s:O", title="stage"),
                alt.Tooltip("t:N", title="at most"),
                alt.Tooltip("a:Q", title="from ms"),
                alt.Tooltip("b:Q", title="to ms"),
            ],
        )
    )
    return Plot(chart, {"memory": rows})


def said(step: RecordedStep) -> str:
    """The stage that came closest to its limit, in words."""
    stages = held(step)
    limited = [own for own in stages if own.limit]
    if limited:
        own = max(limited, key=lambda own: own.peak / (own.limit or 1))
        text = f"Closest to its limit: stage {own.stage}, {_of_limit(own, own.peak)}."
    else:
        own = max(stages, key=lambda own: own.peak)
        text = f"There is no limit. Stage {own.stage} holds most: {_amount(own, own.peak)}."
    what = "A microbatch" if step.trace.placement.chunks == 1 else "Each chunk of a microbatch"
    return text if own.in_bytes else f"{text} {what} counts from its F to its B or W."


def _rows(step: RecordedStep, own: Held, most: int, times: int) -> Iterator[Row]:
    """Equal neighbours as one."""
    start, span = step.trace.start, step.trace.makespan
    amounts = _largest(own.since, start, span / times, times)
    at = 0
    for amount, equal in groupby(amounts):
        count = len(list(equal))
        limit = own.limit or most
        yield {
            "s": own.stage,
            "a": milliseconds(at * span / times),
            "b": milliseconds((at + count) * span / times),
            "x": round(amount / limit, 4),
            "t": _of_limit(own, amount),
        }
        at += count


def _largest(since: list[tuple[float, int]], start: float, width: float, times: int) -> list[int]:
    """The most in each of so many times of a width (s) from the start on."""
    found = [0] * times
    for (begin, amount), (end, _) in pairwise([*since, (start + width * times, 0)]):
        first, last = (min(int((at - start) / width), times - 1) if width else 0 for at in (begin, end))
        for at in range(first, last + 1):
            found[at] = max(found[at], amount)
    return found


def _of_limit(own: Held, amount: int) -> str:
    said = _amount(own, amount)
    return said if own.limit is None else f"{said} of {_amount(own, own.limit)}"


def _amount(own: Held, amount: int) -> str:
    return f"{amount / 2**20:,.1f} MiB" if own.in_bytes else f"{amount} in flight"
