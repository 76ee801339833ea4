"""The steps of a run, from the files that it left."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import msgspec

from rrfp_jax.explain.explanation import TimedStep
from rrfp_jax.files import read_whole
from rrfp_jax.json_files import LARGEST_LINES, Count, Seconds, Unreadable, as_kind, parse_json
from rrfp_jax.views.trace_reading import read_trace

Steps: TypeAlias = dict[int, "_Line"]


class _Line(msgspec.Struct, frozen=True):
    """A line of `metrics.jsonl`, as far as it is about time."""

    step: Count
    wall_seconds: Seconds
    load_seconds: Seconds = 0.0
    planning_seconds: Seconds = 0.0


def read_run(folder: Path) -> list[TimedStep]:
    """The latest steps that trained, of `trace.json`, with the times that `metrics.jsonl` has of them.

    Raises:
        Unreadable: a file is missing, or not what a run writes; or no step has both.
    """
    trace, metrics = folder / "trace.json", folder / "metrics.jsonl"
    if not trace.exists() and folder.is_dir():
        raise Unreadable(f"{folder} has no trace.json: give the folder of a run that has ended, as runs/NAME")
    steps = read_trace(folder if folder.is_file() else trace).get("run", [])
    steps = [step for step in steps if not step.rules.forward_only]
    if not steps:
        raise Unreadable(f"{trace} has no step of a run that trained")
    lines = _lines(metrics) if folder.is_dir() else {}
    found = []
    for step in steps:
        line = lines.get(step.trace.step)
        if line is None:
            found.append(TimedStep(recorded=step, wall_seconds=step.trace.makespan))
        else:
            found.append(
                TimedStep(
                    recorded=step,
                    wall_seconds=max(line.wall_seconds, step.trace.makespan),
                    load_seconds=line.load_seconds,
                    planning_seconds=line.planning_seconds,
                )
            )
    return found


def _lines(path: Path) -> Steps:
    """By step, the lines that are whole: the last one may have been cut short as a run was killed."""
    try:
        lines = read_whole(path, LARGEST_LINES).split(b"\n")[:-1]
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    found: Steps = {}
    for number, line in enumerate(lines, 1):
        try:
            read = as_kind(parse_json(line), _Line)
        except ValueError as error:
            raise Unreadable(f"{path}: line {number} is no step's: {error}") from None
        found[read.step] = read
    return found
