"""What a limit in bytes costs readiness-first: `results/simulated.md`.

    python -m benchmarks.studies.budgets [--json=FILE] [--check] [--quick] [--write] [--seeds=20]

Simulated steps of 8 microbatches a stage whose lengths vary. Every stage may hold so many times the bytes
that 1F1B holds in the same step on its fullest stage: devices are alike, so what the fullest needs all have.
Figures are makespans over the same schedule's without a limit.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from benchmarks.harness import SIMULATED, Aim, finish, parse, put_figures, table
from benchmarks.studies.cells import Cell
from rrfp_jax.core.schedules import by_name
from rrfp_jax.sim.compare import Conditions, compare

SCHEDULES = ("bf", "bfw")
FACTORS = (1.0, 1.5, 2.0, 4.0)
PER_STAGE = 8

CELLS = tuple(
    cell
    for stages in (4, 8)
    for cell in (
        Cell("log-normal, sd 0.3", stages, PER_STAGE),
        Cell("log-normal, sd 0.6", stages, PER_STAGE, sigma=0.6),
        Cell("length-imbalanced", stages, PER_STAGE, family="length-imbalanced"),
        Cell("multimodal", stages, PER_STAGE, family="multimodal"),
    )
)


def measure(cell: Cell, seed: int) -> dict[str, dict[str, float]]:
    """Of one step, by schedule.

    Returns:
        By factor the makespan over that without a limit; as "1f1b" that of 1F1B, and as "bytes" what is held
        without a limit over what 1F1B holds. As "most" the largest share of a limit that was used.
    """
    step = cell.step(seed)
    unlimited = Conditions(limit=None)
    baseline = compare({"1f1b": by_name("1f1b")}, [step], unlimited)["1f1b"]
    assert baseline.bytes is not None
    schedules = {name: by_name(name) for name in SCHEDULES}
    free = compare(schedules, [step], unlimited)
    found = {
        name: {
            "1f1b": baseline.makespan / outcome.makespan,
            "bytes": (outcome.bytes or 0.0) / baseline.bytes,
            "most": 0.0,
        }
        for name, outcome in free.items()
    }
    for factor in FACTORS:
        limit = math.ceil(factor * baseline.bytes)
        for name, outcome in compare(schedules, [step], Conditions(limit=None, byte_limit=limit)).items():
            found[name][f"{factor:g} x"] = outcome.makespan / free[name].makespan
            found[name]["most"] = max(found[name]["most"], (outcome.bytes or 0.0) / limit)
    return found


@dataclass(frozen=True)
class Row:
    """One schedule on a cell's steps: medians over the seeds, by column; of "most", the largest."""

    steps: str
    stages: int
    schedule: str
    figures: Mapping[str, float]


FACTOR_NAMES = tuple(f"{factor:g} x" for factor in FACTORS)
COLUMNS = (*FACTOR_NAMES, "bytes", "1f1b")


def rows_of(cell: Cell, found: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Row]:
    """The medians of a cell's steps."""
    rows = []
    for name in SCHEDULES:
        figures = {column: median(step[name][column] for step in found) for column in COLUMNS}
        figures["most"] = max(step[name]["most"] for step in found)
        rows.append(Row(cell.changed, cell.stages, name, figures))
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """A table for the docs."""
    columns = (*FACTOR_NAMES, "held without a limit", "1F1B's time")
    return table(
        ["steps", "stages", "schedule", *columns],
        [
            (row.steps, row.stages, row.schedule, *(f"{row.figures[column]:.3f}" for column in COLUMNS))
            for row in rows
        ],
    )


def main() -> int:
    """Run all cells, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="4 stages, three seeds")
    parser.add_argument("--write", action="store_true", help="the table into results/simulated.md")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="steps of each kind (20)")
    options = parser.parse_args()
    seeds = range(3 if options.quick else options.seeds)
    rows: list[Row] = []
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for cell in CELLS:
            if options.quick and cell.stages > 4:
                continue
            rows += (own := rows_of(cell, list(pool.map(partial(measure, cell), seeds))))
            for row in own:
                figures = "  ".join(f"{column}: {row.figures[column]:.3f}" for column in COLUMNS)
                print(f"{row.steps:18} {row.stages} stages, {row.schedule:3}  {figures}", flush=True)
    if options.write:
        note = f"Medians of {len(seeds)} paired seeds."
        put_figures(SIMULATED, "budgets", f"\n{note}\n\n{markdown(rows)}\n\n")
    aims = [
        Aim("largest share of a limit that was held", max(row.figures["most"] for row in rows), 1.0, "x"),
        Aim("time at 4 x, largest median", max(row.figures["4 x"] for row in rows), 1.05, "x"),
    ]
    return finish(options, {"rows": [asdict(row) for row in rows]}, aims)


if __name__ == "__main__":
    sys.exit(main())
