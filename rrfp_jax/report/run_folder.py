"""Runs, from the files that they left; and two of them side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.fields import printable
from rrfp_jax.json_files import Unreadable, flat, read_json
from rrfp_jax.report.explanation import LEAST, Explanation, TimedStep, as_text
from rrfp_jax.report.legend import SHARES
from rrfp_jax.report.store import METRICS, STEPS, StepLine, read_lines, read_steps, steps_in

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
        origin: when it began, its commit, schedule and hardware, in a line.
        shared: that processes shared cores or GPUs: idle shares have more causes than the report knows.
    """

    name: str
    steps: Sequence[TimedStep]
    history: Sequence[StepLine] = ()
    settings: Mapping[str, str]
    origin: str = ""
    shared: str = ""

    @property
    def head(self) -> str:
        """The lines above a report; "" if nothing is known."""
        return "".join(f"{line}\n" for line in (self.origin, self.shared) if line)


def absent(given: Path) -> str:
    """What is said of a run that is not there."""
    return f"there is no {given}: give the folder of a run, as runs/NAME, or its {STEPS}"


def read_run(given: Path) -> Run:
    """A run by its folder, or by its `steps.msgpack` alone.

    Raises:
        Unreadable: a file is missing, or not what a run writes; or it has no step that trained.
        UsageError: this user may not search the folder.
    """
    folder = given if given.is_dir() else None
    if not given.exists():
        raise Unreadable(absent(given))
    file = steps_in(folder) if folder else given
    steps = [step for step in read_steps(file).get("run", []) if not step.rules.forward_only]
    if not steps:
        raise Unreadable(f"{file} has no step of a run that trained")
    found, wrong = read_lines(folder / METRICS) if folder else ([], "")
    if wrong:
        raise Unreadable(f"{given / METRICS}: {wrong}")
    lines = {line.step: line for line, _ in sorted(found, key=lambda pair: pair[0].step)}
    timed = []
    for step in steps:
        line = lines.get(step.trace.step, StepLine(step.trace.step))
        wall = max(line.wall_seconds, step.trace.makespan)
        timed.append(TimedStep(step, wall, line.load_seconds, line.planning_seconds))
    kept = given / "config.json"
    config = read_json(kept, dict[str, Any]) if folder and kept.exists() else {}
    origin, schedule = config.get("_origin"), line.schedule or steps[-1].rules.name
    return Run(
        origin=_origin_line(origin if isinstance(origin, dict) else {}, schedule),
        shared=shared_by(origin),
        name=(folder or given.absolute().parent).resolve().name,
        steps=timed,
        history=list(lines.values()),
        settings={n: json.dumps(own) for n, own in flat({k: config[k] for k in config if k not in OWN})},
    )


def _origin_line(origin: Mapping[str, Any], schedule: str) -> str:
    git, hardware = (own if isinstance(own := origin.get(k), dict) else {} for k in ("git", "hardware"))
    changed = " with changes" if git.get("dirty") else ""
    commit = f"commit {str(git['commit'])[:9]}{changed}" if "commit" in git else None
    parts = [origin.get("started"), commit, f"schedule {schedule}", hardware.get("words")]
    return printable(", ".join(str(part) for part in parts if part))


def shared_by(origin: Any) -> str:
    """That processes shared cores or GPUs, as `_origin` in a run's `config.json` has it; "" if none did."""
    hardware = origin.get("hardware") if isinstance(origin, dict) else None
    shared = hardware.get("shared") if isinstance(hardware, dict) else None
    return printable(shared) if isinstance(shared, str) else ""


ABSENT = "-"


@dataclass(frozen=True)
class TwoRuns:
    """Two runs and their explanations. Printed it is their sentences and three tables."""

    runs: tuple[Run, Run]
    explanations: tuple[Explanation, Explanation]

    @property
    def names(self) -> tuple[str, str]:
        """By which the runs are told apart."""
        first, second = (run.name for run in self.runs)
        return (first, second) if first != second else (f"{first} (1)", f"{second} (2)")

    @property
    def sentences(self) -> list[str]:
        """How their steps compare, what matters most in each, and how far that can be trusted."""
        one, two = (explanation.seconds for explanation in self.explanations)
        faster, share = (1, 1 - two / one) if two <= one else (0, 1 - one / two)
        both = f"{min(one, two) * 1e3:.1f} ms instead of {max(one, two) * 1e3:.1f} ms"
        means = "(means of the traced steps)"
        compared = f"A step of {self.names[faster]} takes {share:.1%} less time: {both} {means}."
        if share < LEAST:
            compared = f"Steps of both take equally long: {one * 1e3:.1f} ms {means}."
        causes = zip(self.names, self.explanations, strict=True)
        said = [f"{name}: {explanation.sentence} {explanation.trust}" for name, explanation in causes]
        return [compared, *said, *{own.caveat for own in self.explanations if own.caveat}]

    def __str__(self) -> str:
        tables = [rows for rows in (self.seconds(), self.savings(), self.settings()) if len(rows) > 1]
        return as_text(110, *self.sentences, *tables)

    def seconds(self) -> list[list[str]]:
        """Of a step, by cause: in each run, and how much more in the second; the first row is the head."""
        one, two = self.explanations
        rows = [["where a step's time went", *self.names, "difference"]]
        rows.append(["all", *_two_times(one.seconds, two.seconds)])
        for name, row in SHARES.items():
            a, b = one.shares[name], two.shares[name]
            if max(a, b) >= LEAST:
                first, second, difference = _two_times(a * one.seconds, b * two.seconds)
                rows.append([row.words, f"{first} ({a:.1%})", f"{second} ({b:.1%})", difference])
        return rows

    def savings(self) -> list[list[str]]:
        """What changes would save in each run; the first row is the head."""
        found = [{saving.change: saving.share for saving in of.savings} for of in self.explanations]
        most = {change: max(own.get(change, 0.0) for own in found) for own in found for change in own}
        rows = [["what if", *self.names]]
        for change in sorted(most, key=lambda change: -most[change]):
            rows.append([change, *(f"{own[change]:.1%}" if change in own else ABSENT for own in found)])
        return rows

    def settings(self) -> list[list[str]]:
        """The fields of their configs that differ; the first row is the head."""
        one, two = (run.settings for run in self.runs)
        names = dict.fromkeys([*one, *two]) if one and two else {}
        rows = [[name, one.get(name, ABSENT), two.get(name, ABSENT)] for name in names]
        return [["setting", *self.names], *(row for row in rows if row[1] != row[2])]


def _two_times(one: float, two: float) -> list[str]:
    """In ms, and the difference."""
    difference = round((two - one) * 1e3, 1) + 0.0  # not -0.0
    return [f"{one * 1e3:.1f} ms", f"{two * 1e3:.1f} ms", f"{difference:+.1f} ms"]
