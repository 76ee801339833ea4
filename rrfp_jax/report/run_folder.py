"""The steps of a run, from the files that it left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.json_files import Unreadable, as_kind, load_json
from rrfp_jax.report.explanation import TimedStep
from rrfp_jax.report.store import METRICS, OLDER, STEPS, StepLine, read_lines, read_steps
from rrfp_jax.trace.records import RecordedStep

READ = (STEPS, METRICS, "config.json")
"""Files of a run that are read."""

OWN = ("name", "directory", "_origin")
"""Of `config.json`: what is of the run, and no setting."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run.

    Attributes:
        name: of its folder.
        steps: the latest that trained, as `steps.msgpack` has them.
        history: all its steps, as `metrics.jsonl` has them; empty if there are only steps.
        settings: the fields of `config.json`, as "mesh.pp", with their values as JSON; empty without.
    """

    name: str
    steps: Sequence[TimedStep]
    history: Sequence[StepLine] = ()
    settings: Mapping[str, str]


def read_run(given: Path) -> Run:
    """A run by its folder, or by its `steps.msgpack` alone.

    Raises:
        Unreadable: a file is missing, or not what a run writes; or it has no step that trained.
    """
    folder = given if given.is_dir() else None
    file = given / STEPS if folder else given
    if not given.exists():
        raise Unreadable(f"there is no {given}: give the folder of a run, as runs/NAME, or its {STEPS}")
    if not file.exists():
        if (given / "trace.json").exists():
            raise Unreadable(f"{given} has a trace.json, for ui.perfetto.dev, but no {STEPS}. {OLDER}")
        raise Unreadable(f"{given} has no {STEPS}: give the folder of a run that has ended, as runs/NAME")
    steps = [step.recorded for step in read_steps(file).get("run", [])]
    steps = [step for step in steps if not step.rules.forward_only]
    if not steps:
        raise Unreadable(f"{file} has no step of a run that trained")
    found, wrong = read_lines(folder / METRICS) if folder else ([], "")
    if wrong:
        raise Unreadable(f"{given / METRICS}: {wrong}")
    lines = {line.step: line for line, _ in sorted(found, key=lambda pair: pair[0].step)}
    return Run(
        name=(folder or given.absolute().parent).resolve().name,
        steps=[_timed(step, lines.get(step.trace.step)) for step in steps],
        history=list(lines.values()),
        settings=_settings(given / "config.json") if folder else {},
    )


def _timed(step: RecordedStep, line: StepLine | None) -> TimedStep:
    if line is None:
        return TimedStep(recorded=step, wall_seconds=step.trace.makespan)
    return TimedStep(
        recorded=step,
        wall_seconds=max(line.wall_seconds, step.trace.makespan),
        load_seconds=line.load_seconds,
        planning_seconds=line.planning_seconds,
    )


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
