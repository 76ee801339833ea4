"""Traces in Chrome's JSON format, for Perfetto (ui.perfetto.dev) and chrome://tracing; nothing reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rrfp_jax.json_files import write_json
from rrfp_jax.report.legend import DELAY
from rrfp_jax.report.store import write_steps
from rrfp_jax.trace.records import RecordedStep, StepTrace

SHORTEST_GAP = 50e-6
"""Idle times below this (s) are left out of the file."""


def write_trace(
    path: str | Path, groups: Mapping[str, Iterable[RecordedStep]], clock: str = "rank 0"
) -> None:
    """Write groups of steps, of each one track per stage, in microseconds from 0 on the clock of rank 0.

    There are tasks, the gaps between them with what was awaited, and arrows for transfers. A task that was
    delayed on purpose has a slice for that within its own. `otherData` says how precisely clocks are known.
    A name that ends with .msgpack is given steps as `rrfp report` and `rrfp sim` read them.

    Raises:
        UsageError: the file cannot be written.
    """
    if Path(path).suffix == ".msgpack":
        return write_steps(path, groups)
    events: list[dict[str, Any]] = []
    precision = 0.0
    for pid, (name, steps) in enumerate(groups.items()):
        traces = [step.trace for step in steps]
        events += [event | {"pid": pid} for event in _group(name, traces)]
        precision = max([precision, *(part.precision for trace in traces for part in trace.parts)])
    about = {"clock": clock, "clock_precision_us": _microseconds(precision)}
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _group(name: str, steps: Sequence[StepTrace]) -> Iterator[dict[str, Any]]:
    """The events of some steps, but for the number of their group."""
    origin = min((step.start for step in steps), default=0.0)
    yield {"ph": "M", "name": "process_name", "args": {"name": name}}
    for stage in range(max((step.stages for step in steps), default=0)):
        title = {"name": f"stage {stage}"}
        yield {"ph": "M", "name": "thread_name", "tid": stage, "args": title}
    for step in steps:
        yield from _slices(step, origin)
        yield from _arrows(step, origin, f"{name}.{step.step}")


def _slices(step: StepTrace, origin: float) -> Iterator[dict[str, Any]]:
    """Tasks, the ends of tasks that injected delays are, and idle times."""

    def slice_of(name: str, stage: int, start: float, end: float, /, **args: Any) -> dict[str, Any]:
        times = {"ts": _microseconds(start - origin), "dur": _microseconds(end - start)}
        about = {"name": name, "cat": "task", "tid": stage, "args": args | {"step": step.step}}
        return {"ph": "X", **about, **times}

    for record in step.records:
        seconds = {"ready": record.ready - origin, "dispatched": record.dispatched - origin}
        injected = {"delayed": record.delayed, "late": record.late}
        seconds |= {name: own for name, own in injected.items() if own}
        kind, chunk, microbatch = record.task
        place = {"stage": record.stage, "chunk": chunk, "microbatch": microbatch, "bucket": record.bucket}
        times = {name: _microseconds(own) for name, own in seconds.items()}
        about: dict[str, Any] = {"kind": kind.letter, **place, **times}
        if record.held is not None:
            about["held"] = record.held
        yield slice_of(str(record.task), record.stage, record.start, record.end, **about)
        if record.delayed:
            yield slice_of(DELAY, record.stage, record.computed, record.end, of=str(record.task))
    for stage in range(step.stages):
        idle_since = step.start
        for record in step.stage_records(stage):
            if record.start - idle_since > SHORTEST_GAP:
                about = {"awaited": str(record.task), "ready": _microseconds(record.ready - origin)}
                yield slice_of("idle", stage, idle_since, record.start, **about)
            idle_since = max(idle_since, record.end)


def _arrows(step: StepTrace, origin: float, mark: str) -> Iterator[dict[str, Any]]:
    """From the end of every task to the task on another stage that its output made ready; named by a mark."""
    for number, sender in enumerate(step.records):
        if (receiver := step.receiver(sender)) is not None:
            same = {"name": "transfer", "cat": "transfer", "id": f"{mark}.{number}"}
            # An arrow belongs to the slice that it begins in: at its very end the next one may begin.
            leaves = max(sender.start, sender.end - 1e-6) - origin
            yield {"ph": "s", "tid": sender.stage, "ts": _microseconds(leaves), **same}
            # An end before its beginning, by the clocks' imprecision, would not be drawn.
            comes = _microseconds(max(leaves, receiver.start - origin))
            yield {"ph": "f", "bp": "e", "tid": receiver.stage, "ts": comes, **same}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
