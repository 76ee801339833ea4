"""Readiness-first against its rivals at equal bytes, in the simulator: `results/simulated.md`.

    python -m benchmarks.studies.simulated [--json=FILE] [--check] [--quick] [--write] [--planned]
        [--seeds=20] [--largest=64] [--jobs=N]

19 kinds of steps (`cells.py`), each with 0.5 to 2 times the bytes that 1F1B holds on its fullest stage in the
same step: devices are alike, so what the fullest needs all have. Every schedule gets the same steps (paired
seeds). Fixed orders are followed strictly, whatever they hold; they count as rivals where that fits.
With `--planned`, which takes 100 simulations a step more, also the best of all orders with one chunk a stage
at 1F1B's bytes, improved by simulating what is known of the step. `--write` puts the tables into
results/simulated.md and the picture beside it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from statistics import geometric_mean, median
from typing import TypeAlias

from benchmarks.harness import REPOSITORY, SIMULATED, Aim, finish, parse, put_figures, table
from benchmarks.studies.cells import CELLS, Cell
from benchmarks.studies.pareto import plot
from rrfp_jax.commands.simulation import PLANNED
from rrfp_jax.core.hints import BF
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.compare import byte_budgets
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.families import Step
from rrfp_jax.sim.planned import plan
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.records import peak_bytes

FIXED = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-zb", "v-half", "v-min", "dualpipe-v")
HINTS = ("bfw", "ranked:zb-v", "ranked:v-zb", "ranked:v-half", "ranked:v-min", "ranked:zb-h2")
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
REFERENCE = "zb-v"
"""Followed strictly; all times are over its."""

FITS = 1.001
"""A fixed order is a rival if it holds no more than so many times the limit, in the median."""

EVALUATIONS, FEWEST, PLANNED_TASKS = 100, 12, 150_000
"""A planner simulates a step 100 times, fewer times if these would be more tasks; all candidates at least."""

LARGE, LEAST_SEEDS = 16**2 * 4, 1
"""Squares of the stages times microbatches a stage from which on fewer steps are simulated."""

Figures: TypeAlias = tuple[float, float]
"""Makespan (s), and bytes on the fullest stage, in the end over those of 1F1B."""


def seeds_of(cell: Cell, seeds: int) -> int:
    """How many steps of a cell are simulated: so many, fewer of large ones."""
    size = cell.stages**2 * cell.per_stage
    return min(seeds, max(LEAST_SEEDS, seeds * LARGE // size))


def measure(planned: bool, cell: Cell, seed: int) -> dict[str, dict[str, Figures]]:
    """Of one step: the fixed orders as "fixed", and by factor what was limited; without what cannot run."""
    step = cell.step(seed)
    fixed = {name: figures_of(by_name(name), step) for name in FIXED}
    unit = fixed["1f1b"][1]
    found = {"fixed": fixed}
    for factor in FACTORS:
        limit = math.ceil(factor * unit)
        if max(map(max, step.actual.activation_bytes or ())) > limit:
            found[f"{factor:g}"] = {}  # a microbatch does not fit
            continue
        own = {name: figures_of(by_name(name), step, limit) for name in HINTS}
        if planned and factor == 1:
            own[PLANNED] = figures_of(_plan(cell, step, limit), step)
        found[f"{factor:g}"] = own
    return {what: {name: (t, held / unit) for name, (t, held) in own.items()} for what, own in found.items()}


def figures_of(schedule: Schedule, step: Step, limit: int | None = None) -> Figures:
    """What a schedule takes and holds in a step, at most so many bytes under a hint."""
    placement = schedule.placement_for(step.actual.stages)
    rules = StepRules(placement=placement, microbatches=step.actual.microbatches, schedule=schedule)
    budgets = byte_budgets(step.actual, limit, placement.chunks)
    trace = simulate(rules, WorkloadCosts(step.actual, placement), budgets=budgets)
    assert step.actual.activation_bytes is not None
    return trace.makespan, max(peak_bytes(trace, step.actual.activation_bytes))


def _plan(cell: Cell, step: Step, limit: int) -> Schedule:
    placement = Placement(cell.stages)
    rules = StepRules(placement=placement, microbatches=cell.microbatches, schedule=BF())
    evaluations = min(EVALUATIONS, max(FEWEST, PLANNED_TASKS // (2 * cell.stages**2 * cell.per_stage)))
    budgets = byte_budgets(step.actual, limit, 1)
    return plan(rules, WorkloadCosts(step.known, placement), evaluations=evaluations, budgets=budgets).order


@dataclass(frozen=True)
class Row:
    """One cell at one memory, medians over the seeds.

    Attributes:
        times: by schedule, over those of strict ZB-V; of fixed orders only those that fit.
        bytes: by schedule, on the fullest stage over those of 1F1B; the most of all steps for hints.
    """

    cell: str
    factor: float
    times: Mapping[str, float]
    bytes: Mapping[str, float]

    def best(self, names: Sequence[str]) -> str | None:
        """The fastest of some schedules; None if none of them fits."""
        return min((name for name in names if name in self.times), key=self.times.__getitem__, default=None)

    @property
    def behind(self) -> float:
        """The best hint's time over that of the best fixed order that fits; 0 if none does."""
        hint, rival = self.best(HINTS), self.best(FIXED)
        return self.times[hint] / self.times[rival] if hint and rival else 0.0


def row_of(cell: Cell, factor: float, found: Sequence[dict[str, dict[str, Figures]]]) -> Row:
    """The medians of a cell at one memory."""
    steps = [step["fixed"] | step[f"{factor:g}"] for step in found]
    names = [name for name in (*FIXED, PLANNED, *HINTS) if all(name in step for step in steps)]
    held = {name: (median if name in FIXED else max)(step[name][1] for step in steps) for name in names}
    fits = [name for name in names if name not in FIXED or held[name] <= factor * FITS]
    times = {name: median(step[name][0] / step[REFERENCE][0] for step in steps) for name in fits}
    return Row(cell.changed, factor, times, held)


def markdown(rows: Sequence[Row]) -> str:
    """A table of one memory."""
    names = [name for name in (*FIXED, PLANNED, *HINTS) if any(name in row.times for row in rows)]
    cells = []
    for row in rows:
        best = min(row.times.values(), default=0.0)
        cells.append((row.cell, *(_cell(row.times.get(name), best) for name in names)))
    means = [_cell(_mean(rows, name), 0.0) for name in names]
    return table(["", *names], [*cells, ("geometric mean", *means)])


def _cell(time: float | None, best: float) -> str:
    if time is None:
        return "-"
    return f"**{time:.3f}**" if time == best else f"{time:.3f}"


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """Over all cells; None if it does not fit in some."""
    times = [row.times.get(name, 0.0) for row in rows]
    return geometric_mean(times) if all(times) else None


def write(rows: Sequence[Row], seeds: int) -> None:
    """Put the tables into results/simulated.md and the picture beside it."""
    parts = [f"\nMedians of {seeds} paired seeds, fewer from 32 stages on. A dash: more bytes than that.\n"]
    for factor in FACTORS:
        own = [row for row in rows if row.factor == factor]
        parts.append(f"\n### {factor:g} times the bytes of 1F1B\n\n{markdown(own)}\n")
    put_figures(SIMULATED, "figures", "".join([*parts, "\n"]))
    plot(rows, FIXED, HINTS, REPOSITORY / "docs" / "images" / "simulated.svg")


def main() -> int:
    """Run all cells, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="two small cells, three seeds")
    parser.add_argument("--write", action="store_true", help="tables and picture into docs/")
    parser.add_argument("--planned", action="store_true", help="also orders that are planned")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="steps of each cell (20)")
    parser.add_argument("--largest", type=int, default=64, metavar="N", help="stages at most (64)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    options = parser.parse_args()
    known = [Cell("4 stages", stages=4), Cell("1 a stage", per_stage=1)] if options.quick else CELLS
    cells = [cell for cell in known if cell.stages <= options.largest]
    seeds = 3 if options.quick else options.seeds
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for cell in cells:
            found = list(pool.map(partial(measure, options.planned, cell), range(seeds_of(cell, seeds))))
            for factor in FACTORS:
                rows.append(row := row_of(cell, factor, found))
                shown = "  ".join(f"{name} {time:.3f}" for name, time in row.times.items())
                print(f"{cell.changed:18} {factor:4g} x  {shown}", flush=True)
    if options.write:
        write(rows, seeds)
    return finish(options, {"rows": [asdict(row) for row in rows]}, aims(rows))


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Readiness-first at equal bytes: never far behind, clearly ahead on average, and within its bytes."""
    equal = [row for row in rows if row.factor == 1]
    little = max(row.behind for row in rows if row.factor < 1)
    best = [row.times[name] for row in equal if (name := row.best(HINTS)) is not None]
    bfw = geometric_mean([row.times["bfw"] for row in equal])
    most = max(row.bytes[name] / row.factor for row in rows for name in HINTS if name in row.bytes)
    return [
        Aim("best hint's time over the best that fits, worst cell", max(r.behind for r in equal), 1.01, "x"),
        Aim("the same at 0.5 and 0.75 times the bytes", little, 1.02, "x"),
        Aim("best hint's time over strict ZB-V's, geometric mean", geometric_mean(best), 0.97, "x"),
        Aim("best hint's time over BFW's, geometric mean", geometric_mean(best) / bfw, 0.88, "x"),
        Aim("bytes of hints over the limit", most, 1 + 1e-6, "x"),
    ]


if __name__ == "__main__":
    sys.exit(main())
