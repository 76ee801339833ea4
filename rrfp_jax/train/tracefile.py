"""Traces in Chrome's JSON format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rrfp_jax.core.trace import StepTrace

TRACED_STEPS = 20
"""How many of the latest steps are kept to be written."""

SHORTEST_GAP = 50e-6
"""Idle times below this (s) are left out of the file."""


def write_trace(path: Path, steps: Iterable[StepTrace]) -> None:
    """One track per stage: tasks, and the gaps between them with what was awaited. Times in microseconds."""
    steps = list(steps)
    origin = min((step.start for step in steps), default=0.0)
    events: list[dict[str, Any]] = []
    for stage in range(max((step.stages for step in steps), default=0)):
        name = {"name": f"stage {stage}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": name})
    for step in steps:
        events += _tasks(step, origin)
        events += _gaps(step, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _tasks(step: StepTrace, origin: float) -> list[dict[str, Any]]:
    return [
        _event(
            str(record.task),
            record.stage,
            record.start - origin,
            record.end - record.start,
            {
                "kind": record.task.kind.letter,
                "stage": record.stage,
                "chunk": record.task.chunk,
                "microbatch": record.task.microbatch,
                "bucket": record.bucket,
                "step": step.step,
                "ready": _microseconds(record.ready - origin),
                "dispatched": _microseconds(record.dispatched - origin),
            },
        )
        for record in step.records
    ]


def _gaps(step: StepTrace, origin: float) -> list[dict[str, Any]]:
    return [
        _event(
            "idle",
            gap.stage,
            gap.start - origin,
            gap.end - gap.start,
            {"awaited": str(gap.awaited), "ready": _microseconds(gap.ready - origin), "step": step.step},
        )
        for stage in range(step.stages)
        for gap in step.gaps(stage, SHORTEST_GAP)
    ]


def _event(name: str, stage: int, start: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": _microseconds(start), "dur": _microseconds(seconds)}
    return {"ph": "X", "name": name, "cat": "task", "pid": 0, "tid": stage, **times, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
