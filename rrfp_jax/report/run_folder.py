"""The steps of a run, from the files that it left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rrfp_jax.files import read_whole
from rrfp_jax.json_files import LARGEST_LINES, Count, Seconds, Unreadable, as_kind, load_json, parse_json
from rrfp_jax.report.explanation import TimedStep
from rrfp_jax.report.trace_reading import read_trace

READ = ("trace.json", "metrics.jsonl", "config.json")
"""Files of a run that are read."""

OWN = ("name", "directory", "_origin")
"""Of `config.json`: what is of the run, and no setting."""


class StepLine(msgspec.Struct, frozen=True):
    """A line of `metrics.jsonl`, as far as a report shows it; see `Report`.

    Attributes:
        resumed: whether it is the first step after the run was started again.
    """

    step: Count
    wall_seconds: Seconds
    step_seconds: Seconds = 0.0
    load_seconds: Seconds = 0.0
    planning_seconds: Seconds = 0.0
    schedule: str = ""
    applied: bool = True
    resumed: bool = False
    hyperparams: dict[str, float | None] = {}
    peak_bytes: list[Count] = []
    budget_bytes: list[Count | None] = []


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run.

    Attributes:
        name: of its folder.
        steps: the latest that trained, as `trace.json` has them.
        history: all its steps, as `metrics.jsonl` has them; empty if there is only a trace.
        settings: the fields of `config.json`, as "mesh.pp", with their values as JSON; empty without.
    """

    name: str
    steps: Sequence[TimedStep]
    history: Sequence[StepLine] = ()
    settings: Mapping[str, str]


def read_run(folder: Path) -> Run:
    """A run by its folder, or by a `trace.json` alone.

    Raises:
        Unreadable: a file is missing, or not what a run writes; or it has no step that trained.
    """
    trace = folder / "trace.json"
    if not folder.exists():
        raise Unreadable(f"there is no {folder}: give the folder of a run, as runs/NAME, or its trace.json")
    if not trace.exists() and folder.is_dir():
        raise Unreadable(f"{folder} has no trace.json: give the folder of a run that has ended, as runs/NAME")
    steps = read_trace(folder if folder.is_file() else trace).get("run", [])
    steps = [step for step in steps if not step.rules.forward_only]
    if not steps:
        raise Unreadable(f"{trace} has no step of a run that trained")
    lines = _lines(folder / "metrics.jsonl") if folder.is_dir() else {}
    found = []
    for step in steps:
        line, makespan = lines.get(step.trace.step), step.trace.makespan
        if line is None:
            found.append(TimedStep(recorded=step, wall_seconds=makespan))
        else:
            found.append(
                TimedStep(
                    recorded=step,
                    wall_seconds=max(line.wall_seconds, makespan),
                    load_seconds=line.load_seconds,
                    planning_seconds=line.planning_seconds,
                )
            )
    return Run(
        name=(folder if folder.is_dir() else folder.absolute().parent).resolve().name,
        steps=found,
        history=list(lines.values()),
        settings=_settings(folder / "config.json"),
    )


def _lines(path: Path) -> dict[int, StepLine]:
    """By step, the lines that are whole: the last one may have been cut short as a run was killed."""
    try:
        lines = read_whole(path, LARGEST_LINES).split(b"\n")[:-1]
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    found: dict[int, StepLine] = {}
    for number, line in enumerate(lines, 1):
        try:
            read = as_kind(parse_json(line), StepLine)
        except ValueError as error:
            raise Unreadable(f"{path}: line {number} is no step's: {error}") from None
        found[read.step] = read
    return dict(sorted(found.items()))


def _settings(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        return dict(_flat(as_kind(load_json(path), dict[str, Any])))
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Unreadable(f"{path} is no config.json of a run: {error}") from None


def _flat(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if not before and name in OWN:
            continue
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", json.dumps(value)
