"""A step in charts: its timeline, which can be zoomed, and what its stages held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import altair as alt

from rrfp_jax.core.step_rules import charges_of
from rrfp_jax.core.tasks import KINDS
from rrfp_jax.report.charts import WIDTH, Plot, Row, colours, milliseconds, row_height, thinned
from rrfp_jax.report.sentence import MEANING
from rrfp_jax.report.timeline import DELAY, DELAY_COLOUR
from rrfp_jax.trace.idleness import critical_path, idleness
from rrfp_jax.trace.records import RecordedStep, TaskRecord

LEAST_IDLE = 1e-3
"""Part of the step below which an idle time is left out."""


MOST_TASKS = 40_000
"""That are drawn; of a larger step some stages are left out."""


def drawn_stages(step: RecordedStep) -> list[int]:
    """All stages, or so many of a large step that its picture is still fast: some of every part of it.

    The first, the last and the one that is busy longest are always among them.
    """
    trace = step.trace
    most = MOST_TASKS * trace.stages // max(1, len(trace.records))
    if most >= trace.stages:
        return list(range(trace.stages))
    spread = max(most - 1, 2)  # beside the busiest one
    even = {i * (trace.stages - 1) // (spread - 1) for i in range(spread)}
    return sorted(even | {max(range(trace.stages), key=trace.busy)})


def timeline(step: RecordedStep, longest: float) -> Plot:
    """The step. Its rows have short names, since there are many: stage, from, to, kind, task, ready, input.

    Args:
        step: that ran.
        longest: where the axis ends (s).
    """
    stages = drawn_stages(step)
    records = [record for stage in stages for record in step.trace.stage_records(stage)]
    x = alt.X("a:Q", title="ms", scale=alt.Scale(domain=[0, milliseconds(longest)]))
    y = alt.Y("s:O", title="stage", axis=thinned())
    present = {record.task.kind for record in records}
    drawn = {KINDS[kind].title: KINDS[kind].colour for kind in sorted(present)}
    delays = _delays(step, records)
    scale = colours(drawn | ({DELAY: DELAY_COLOUR} if delays else {}))
    legend = alt.Legend(title=None, orient="bottom")
    times = [_tip("a", "from"), _tip("b", "to")]
    idle = (
        alt.Chart(alt.NamedData("idle"))
        .mark_rect(color="#eeeeee")
        .encode(x=x, x2="b:Q", y=y, tooltip=[_tip("k", "why"), _tip("t", "waits for"), *times])
    )
    colour = alt.Color("k:N", scale=scale, legend=legend)
    said = [_tip("t", "task"), _tip("k", "kind"), *times]
    tasks = (
        alt.Chart(alt.NamedData("tasks"))
        .mark_rect()
        .encode(x=x, x2="b:Q", y=y, color=colour, tooltip=[*said, _tip("r", "ready"), _tip("n", "input")])
    )
    injected = (
        alt.Chart(alt.NamedData("delays")).mark_rect().encode(x=x, x2="b:Q", y=y, color=colour, tooltip=said)
    )
    critical = (
        alt.Chart(alt.NamedData("critical"))
        .mark_rect(fillOpacity=0, stroke="black", strokeWidth=1.2)
        .encode(x=x, x2="b:Q", y=y)
    )
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    height = alt.Step(row_height(len(stages)))
    chart = alt.layer(idle, tasks.add_params(zoom), injected, critical)
    rows = {"tasks": _tasks(step, records), "delays": delays}
    shown = set(stages)
    for name, found in (("idle", _idle(step)), ("critical", _critical(step))):
        rows[name] = [row for row in found if row["s"] in shown]
    return Plot(chart.properties(width=WIDTH, height=height), rows)


def _tasks(step: RecordedStep, records: Sequence[TaskRecord]) -> list[Row]:
    begin = step.trace.start
    return [
        {
            "s": record.stage,
            "a": milliseconds(record.start - begin),
            "b": milliseconds(record.end - begin),
            "k": KINDS[record.task.kind].title,
            "t": str(record.task),
            "r": milliseconds(record.ready - begin),
            "n": _transfer(step, record),
        }
        for record in records
    ]


def _transfer(step: RecordedStep, record: TaskRecord) -> str:
    """Where a task's input came from, and how long that took."""
    sender = step.trace.sender(record)
    if sender is None or sender.stage == record.stage:
        return ""
    return f"stage {sender.stage}, {milliseconds(max(record.ready - sender.end, 0.0))} ms on its way"


def _delays(step: RecordedStep, records: Sequence[TaskRecord]) -> list[Row]:
    """The ends of tasks that injected delays are."""
    begin = step.trace.start
    return [
        {
            "s": record.stage,
            "a": milliseconds(record.computed - begin),
            "b": milliseconds(record.end - begin),
            "k": DELAY,
            "t": str(record.task),
        }
        for record in records
        if record.delayed
    ]


def _idle(step: RecordedStep) -> list[Row]:
    trace = step.trace
    return [
        {
            "s": idle.stage,
            "a": milliseconds(idle.start - trace.start),
            "b": milliseconds(idle.end - trace.start),
            "k": MEANING[idle.cause],
            "t": "" if idle.source is None else f"{idle.source[1]} of stage {idle.source[0]}",
        }
        for idle in idleness(trace, step.fixed_order, step.grouped)
        if idle.seconds > LEAST_IDLE * trace.makespan
    ]


def _critical(step: RecordedStep) -> list[Row]:
    begin = step.trace.start
    return [
        {"s": part.stage, "a": milliseconds(part.start - begin), "b": milliseconds(part.end - begin)}
        for part in critical_path(step.trace, step.grouped)
        if part.cause is None
    ]


def _tip(field: str, title: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:{'N' if field in 'ktn' else 'Q'}", title=title)


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
    rows = [row for own in stages for row in _held_rows(step, own, most, times)]
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


def _held_rows(step: RecordedStep, own: Held, most: int, times: int) -> Iterator[Row]:
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
