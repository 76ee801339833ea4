"""How far the simulated rows are from the paper's: step times by column, and ratios to 1F1B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import table
from benchmarks.studies.paper.published import FITTED, SCHEDULES, Row
from benchmarks.studies.paper.steps import paper, seconds
from benchmarks.studies.paper.workloads import Machine

RATIOS = ("BF", "BFW")
"""Over 1F1B."""


@dataclass(frozen=True)
class Scored:
    """One row.

    Attributes:
        name: of the row.
        simulated, theirs: seconds by schedule.
    """

    name: str
    simulated: dict[str, float]
    theirs: dict[str, float]

    @property
    def fitted(self) -> bool:
        """Whether the machine was fitted to it."""
        return self.name in FITTED

    @property
    def off(self) -> dict[str, float]:
        """By which share each step time is too long."""
        return {name: self.simulated[name] / self.theirs[name] - 1 for name in SCHEDULES}

    @property
    def ratios_off(self) -> dict[str, float]:
        """The same of the ratios to 1F1B."""
        base = self.simulated["1F1B"] / self.theirs["1F1B"]
        return {name: self.simulated[name] / self.theirs[name] / base - 1 for name in RATIOS}

    @property
    def worst(self) -> float:
        """The largest error of its step times."""
        return max(map(abs, self.off.values()))


def score(machine: Machine, seeds: int, row: Row) -> Scored:
    """Simulate a row."""
    simulated = {name: seconds(row, machine, how, seeds) for name, how in paper(row, machine).items()}
    return Scored(row.name, simulated, dict(zip(SCHEDULES, row.seconds, strict=True)))


def times_error(rows: Sequence[Scored]) -> float:
    """Median over rows and columns."""
    return median(abs(off) for row in rows for off in row.off.values())


def ratios_error(rows: Sequence[Scored]) -> float:
    """Median over rows and both ratios."""
    return median(abs(off) for row in rows for off in row.ratios_off.values())


def held_out(rows: Sequence[Scored]) -> list[Scored]:
    """Those to which nothing was fitted."""
    return [row for row in rows if not row.fitted]


def markdown(rows: Sequence[Scored]) -> str:
    """Every row, worst first; simulated seconds with their errors, and those of the ratios."""
    heads = ["row, TP/PP/DP", "", *SCHEDULES, *(f"{name}/1F1B" for name in RATIOS)]
    cells = []
    for row in sorted(rows, key=lambda row: -row.worst):
        times = [f"{row.simulated[name]:.2f} ({row.off[name]:+.0%})" for name in SCHEDULES]
        ratios = [
            f"{row.simulated[name] / row.simulated['1F1B']:.2f} ({row.ratios_off[name]:+.0%})"
            for name in RATIOS
        ]
        kind = "fitted" if row.fitted else "held out"
        cells.append((row.name, kind, *times, *ratios))
    for what, own in (("fitted", [row for row in rows if row.fitted]), ("held out", held_out(rows))):
        times = [f"{median(abs(row.off[name]) for row in own):.0%}" for name in SCHEDULES]
        ratios = [f"{median(abs(row.ratios_off[name]) for row in own):.0%}" for name in RATIOS]
        cells.append(("median error", what, *times, *ratios))
    return table(heads, cells)
