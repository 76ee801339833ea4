"""Steps explained: a sentence, the shares of their time, and what changes would save."""

from __future__ import annotations

import html
import io
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table

from rrfp_jax.report.causes import NOTEWORTHY, Finding, Saving, main_cause
from rrfp_jax.report.legend import SHARES
from rrfp_jax.report.what_if import SPLIT, SPLIT_COSTS, TRUSTED_ERROR, WhatIfs, what_ifs
from rrfp_jax.sim.splits import Layers
from rrfp_jax.trace.idleness import shares, stage_times
from rrfp_jax.trace.records import RecordedStep

MOST_REPLAYED = 40_000
"""Tasks of the steps whose what-ifs are simulated, the latest steps first: that takes some ten seconds."""

Rows: TypeAlias = Sequence[Sequence[str]]

LEAST = 0.0005
"""Shares below this are not shown."""

MOST_SAVINGS = 12
"""That are shown."""

SAME = 0.005
"""Shares that are closer are as large, in words."""


@dataclass(frozen=True)
class TimedStep:
    """A step with what it took beside its tasks.

    Attributes:
        recorded: its tasks, and what they were decided by.
        wall_seconds: the whole step.
        load_seconds: of that, waiting for data.
        planning_seconds: of that, planning its order.
    """

    recorded: RecordedStep
    wall_seconds: float
    load_seconds: float = 0.0
    planning_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why steps took as long as they did. Printed it is a sentence and two tables.

    Attributes:
        finding: what matters most.
        steps: how many it is about.
        seconds: of a step, with everything; the mean, of which these are shares.
        shares: of that time, by cause, adding up to 1: "compute", "delayed" for devices that injected delays
            keep busy, the causes of idleness by name, "data", "planning", and "between" for what is between
            the tasks of two steps, such as the update.
        savings: the largest first; empty if the simulator is too far off to tell.
        error: how far it is off on the steps as they were, as a share of their time.
    """

    finding: Finding
    steps: int
    seconds: float
    shares: Mapping[str, float]
    savings: Sequence[Saving]
    error: float

    @property
    def sentence(self) -> str:
        """What matters most, in words."""
        return self.finding.sentence

    def __str__(self) -> str:
        savings = self.saving_rows() or self.trust
        return as_text(80, self.sentence, self.share_rows(), savings, *([self.caveat] * bool(self.caveat)))

    @property
    def caveat(self) -> str:
        """What the what-ifs leave out of schedules that split backwards; "" without any."""
        return SPLIT_COSTS if any(SPLIT in saving.change for saving in self.savings) else ""

    @property
    def trust(self) -> str:
        """How far the what-ifs can be trusted, and why there are none if there are none."""
        off = f"As the steps were, the simulator is {self.error:.1%} off"
        if self.error > TRUSTED_ERROR:
            return f"No what-ifs: {off[0].lower()}{off[1:]}, and up to {TRUSTED_ERROR:.0%} would be trusted."
        return f"{off}." if self.savings else f"{off}. No change that was tried saves anything."

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def share_rows(self) -> Rows:
        """Where the time went; the first row is the head."""
        rows = [(SHARES[name].words, f"{share:.1%}") for name, share in self.shares.items() if share >= LEAST]
        return [(f"where {self.seconds * 1e3:.1f} ms of a step went", "share"), *rows]

    def saving_rows(self) -> Rows:
        """What changes would save; the first row is the head. Empty if there are none."""
        rows = [(saving.change, f"{saving.share:.1%}") for saving in self.savings]
        head = f"what if (the simulator is {self.error:.1%} off on these steps as they were)"
        return [(head, "saves"), *rows] if rows else []


def as_text(width: int, *parts: str | Rows) -> str:
    """Lines, and tables whose first row is the head."""
    text = io.StringIO()
    plain = dict.fromkeys(("force_jupyter", "force_terminal", "markup", "emoji"), False)
    console = Console(file=text, width=width, **plain)  # type: ignore[arg-type]
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False)
            continue
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(part[0]):
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in part[1:]:
            table.add_row(*row)
        console.print(table, highlight=False)
    return text.getvalue().rstrip()


def explain(steps: Sequence[TimedStep]) -> Explanation:
    """Explain steps that trained, at least one; the latest last.

    Raises:
        ValueError: their traces and rules do not belong together.
    """
    found = _time_shares(steps)
    recorded = [step.recorded for step in steps]
    layers = Layers.of(recorded)
    placement = None if layers is None else layers.placement
    latest = recorded[::-1]  # as many as are simulated in some seconds, at least one
    counts = accumulate(len(step.trace.records) for step in latest)
    replays = [
        what_ifs(step, layers=layers if step.rules.placement == placement else None)
        for step in latest[: max(1, sum(count <= MOST_REPLAYED for count in counts))]
    ]
    error = fmean(replay.error for replay in replays)
    tasks = 1.0 - found["data"] - found["planning"] - found["between"]
    savings = _savings(replays, tasks) if error <= TRUSTED_ERROR else []
    finding = main_cause(recorded, found, savings, layers)
    # The largest of all may undo no cause, or several.
    if savings and savings[0].share >= max(NOTEWORTHY, finding.share + SAME):
        more = f"Of all changes tried, the largest saving is {savings[0].share:.0%}: {savings[0].change}."
        finding = replace(finding, sentence=f"{finding.sentence} {more}")
    return Explanation(
        finding=finding,
        steps=len(steps),
        seconds=fmean(step.wall_seconds for step in steps),
        shares=found,
        savings=[saving for saving in savings[:MOST_SAVINGS] if saving.share >= 0.005],
        error=error,
    )


def _time_shares(steps: Sequence[TimedStep]) -> dict[str, float]:
    """Of all seconds of all steps."""
    seconds = Counter[str]()
    for step in steps:
        recorded = step.recorded
        span = recorded.trace.makespan
        times = stage_times(recorded.trace, recorded.fixed_order, recorded.grouped)
        found = {name: span * share for name, share in shares(times).items()}
        before = max(step.wall_seconds - span - step.planning_seconds, 0.0)
        data = min(step.load_seconds, before)  # other stages may have begun while one still loads
        found |= {"data": data, "planning": step.planning_seconds, "between": before - data}
        seconds.update(found)
    whole = sum(seconds.values())
    return {name: seconds[name] / whole if whole else 0.0 for name in SHARES}


def _savings(replays: Sequence[WhatIfs], tasks: float) -> list[Saving]:
    """Of all replayed steps, whose tasks have this share; a change that a step lacks saves nothing there."""
    whole = sum(replay.replayed for replay in replays)
    saved: dict[tuple[str, Hashable, str], float] = defaultdict(float)
    words = dict[tuple[str, Hashable, str], str]()
    for replay in replays:
        for change in replay.changes:
            # How many microbatches a schedule may hold is named, but may differ between steps.
            key = change.kind, change.subject, "" if change.kind == "schedule" else change.change
            saved[key] += replay.replayed - change.seconds
            words[key] = change.change
    parts = {key: tasks * seconds / whole if whole else 0.0 for key, seconds in saved.items()}
    found = [Saving(*key[:2], words[key], share) for key, share in parts.items()]
    return sorted(found, key=lambda saving: -saving.share)
