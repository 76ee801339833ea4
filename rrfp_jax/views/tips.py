"""What hovering over a picture of a step tells: of a task its times, of an idle stage what it waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rrfp_jax.trace.idleness import CAUSES, Idle
from rrfp_jax.trace.records import TaskRecord
from rrfp_jax.views.picture import Panel, told


class Tip(NamedTuple):
    """A text, and where it is told: on which row, from when to when (s)."""

    stage: int
    start: float
    end: float
    text: str


def tips(panel: Panel) -> Iterator[Tip]:
    """One for every task and every gap between tasks."""
    for record in panel.trace.records:
        yield Tip(record.stage, record.start, record.end, _of_task(panel, record))
    for parts in _gaps(panel.idle):
        yield Tip(parts[0].stage, parts[0].start, parts[-1].end, _of_gap(panel, parts))


def _gaps(found: Sequence[Idle]) -> Iterator[list[Idle]]:
    """Idle times that follow one another without a task between them."""
    number, end, numbered = 0, None, []
    for idle in found:
        number += (idle.stage, idle.start) != end
        end = idle.stage, idle.end
        numbered.append((number, idle))
    for _, parts in groupby(numbered, key=lambda pair: pair[0]):
        yield [idle for _, idle in parts]


def _of_task(panel: Panel, record: TaskRecord) -> str:
    start = told(record.start - panel.trace.start)
    waited = record.start - record.ready
    lines = [f"{record.task} on stage {record.stage}: {told(record.end - record.start)} from {start} on"]
    sender = panel.trace.sender(record)
    if sender is not None and sender.stage != record.stage:
        ended = told(record.ready - sender.end)
        lines += [
            f"needed {sender.task} of stage {sender.stage}, which had ended {ended} before it was ready"
        ]
    if record.late:
        lines += [f"{told(record.late)} of that was injected"]
    if record.delayed:
        lines += [f"the last {told(record.delayed)} of it are an injected delay"]
    return "\n".join([*lines, f"ready {told(waited)} before it began"])


def _of_gap(panel: Panel, parts: Sequence[Idle]) -> str:
    first, last = parts[0], parts[-1]
    seconds, start = told(last.end - first.start), told(first.start - panel.trace.start)
    lines = [f"{told(part.seconds)}: {reason(part)}" for part in parts]
    return "\n".join([f"stage {first.stage} idle for {seconds} from {start} on", *lines])


def reason(idle: Idle) -> str:
    """Why a stage's device did nothing, as far as the trace knows."""
    task = idle.awaited
    source = "" if idle.source is None else f"{idle.source[1]} of stage {idle.source[0]}"
    waits = f"{task} waits for {source}" if source else f"{task} is not ready, though it needs no other stage"
    after = f", which waits for {source}" if source else ""
    return CAUSES[idle.cause].gap.format(task=task, source=source, waits=waits, after=after)
