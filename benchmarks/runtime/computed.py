"""Real compute in two processes, a core each: which schedule is fastest, and is it what the simulator says?

    python -m benchmarks.runtime.computed [--json=FILE] [--check] [--quick] [--write] [--steps=FILE]

A small GPT, two stages, 8 and 16 microbatches of 64 to 256 tokens a sequence. Nothing sleeps; every process
is pinned to a core of its own, where its stage computes and its host decides and sends. Schedules take turns,
round by round, on the same microbatches. Each has them twice, and the second step counts: after a change from
fused to split backwards a step begins late. Beside the median step stands the one simulated from what the
tasks and messages of the same schedule took (`benchmarks/studies/observed.py`). `--steps` keeps the steps,
for `benchmarks.studies.prediction`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.harness import (
    RESULTS,
    Aim,
    Compared,
    finish,
    output_of,
    parse,
    percent_longer,
    put_figures,
    table,
)
from benchmarks.runtime.computed_rank import COMPARED, RANKS, Case
from benchmarks.studies.observed import Observed
from benchmarks.studies.pictures import simulated_against
from rrfp_jax.report.store import read_steps, write_steps
from rrfp_jax.trace.records import RecordedStep, peak_bytes

PROOF = RESULTS / "proof.md"

ROUNDS, LIMIT_SECONDS = 6, 900.0

ALIKE = 2.0
"""Schedules that are less than so many per cent apart have no order."""


def sitting(rounds: int) -> Mapping[str, Sequence[RecordedStep]]:
    """The steps of all cases, by name, of so many rounds.

    Raises:
        RuntimeError: a rank failed; with what the launcher said.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        launch = (sys.executable, "-m", "rrfp_jax", "launch", "-n", str(RANKS), "--directory", folder)
        output_of([*launch, "-m", "benchmarks.runtime.computed_rank", str(file), str(rounds)], LIMIT_SECONDS)
        return {name: [step.recorded for step in steps] for name, steps in read_steps(file).items()}


@dataclass(frozen=True, kw_only=True)
class Row(Compared):
    """A schedule on so many microbatches.

    Attributes:
        real, simulated: seconds of a step, medians over the rounds.
        held: most microbatches that a stage held, a chunk counting as its part of one.
    """

    schedule: str
    microbatches: int
    held: float

    def __str__(self) -> str:
        return (
            f"{self.schedule:12} {self.microbatches:3} microbatches: real {1e3 * self.real:.1f} ms, "
            f"simulated {1e3 * self.simulated:.1f} ms, off by {self.percent:+.1f} %, held {self.held:g}"
        )


def row_of(case: Case, steps: Sequence[RecordedStep]) -> Row:
    """Of a case's steps."""
    observed, units = Observed(steps), ((1.0,) * case.microbatches,) * RANKS
    return Row(
        schedule=case.schedule,
        microbatches=case.microbatches,
        real=median(step.trace.makespan for step in steps),
        simulated=median(map(observed.predicted, steps)),
        held=max(max(peak_bytes(step.trace, units)) for step in steps),
    )


def swapped(rows: Sequence[Row]) -> list[str]:
    """Schedules that stand in another order than simulated, and are not alike."""
    found = []
    for one, other in combinations(rows, 2):
        if one.microbatches != other.microbatches:
            continue
        real, simulated = (
            percent_longer(a, b) for a, b in ((one.real, other.real), (one.simulated, other.simulated))
        )
        if real * simulated < 0 and min(abs(real), abs(simulated)) > ALIKE:
            found.append(f"{one.schedule} and {other.schedule}, {one.microbatches} microbatches")
    return found


def markdown(rows: Sequence[Row]) -> str:
    """All, beside 1F1B on as many microbatches."""
    heads = ["microbatches", "schedule", "real, ms", "over 1F1B's", "simulated, ms", "over 1F1B's", "held"]
    base = {row.microbatches: row for row in rows if row.schedule == "1f1b"}
    cells = []
    for row in rows:
        own = base[row.microbatches]
        real, simulated = f"{row.real / own.real:.3f}", f"{row.simulated / own.simulated:.3f}"
        took = f"{1e3 * row.real:.0f}", real, f"{1e3 * row.simulated:.0f}", simulated
        cells.append((row.microbatches, f"`{row.schedule}`", *took, f"{row.held:g}"))
    return table(heads, cells)


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--write", action="store_true", help="the table into results/proof.md")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="write the steps of all cases here")
    options = parser.parse_args()
    found = sitting(1 if options.quick else ROUNDS)
    if options.steps:
        write_steps(options.steps, found)
    rows = [row_of(case, found[case.name]) for case in COMPARED]
    print(*rows, sep="\n")
    if options.write:
        link = "![simulated beside measured](images/proof-computed.svg)"
        put_figures(PROOF, "computed", f"\n{link}\n\n{markdown(rows)}\n\n")
        points = {
            f"{count} microbatches": [(r.real, r.simulated, True) for r in rows if r.microbatches == count]
            for count in sorted({row.microbatches for row in rows})
        }
        simulated_against(
            "measured", points, "a point for each schedule; ", 0.1, PROOF.parent / "images/proof-computed.svg"
        )
    others = swapped(rows)
    aims = [
        Aim(
            f"pairs in another order than simulated ({'; '.join(others) or 'none'})", len(others), 0, "pairs"
        ),
        Aim("largest difference of real and simulated", max(abs(row.percent) for row in rows), 10.0, "%"),
    ]
    return finish(options, {"cases": [asdict(row) for row in rows]}, aims)


if __name__ == "__main__":
    sys.exit(main())
