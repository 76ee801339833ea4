"""What adding gradients in microbatch order costs where messages overtake one another: results/simulated.md.

    python -m benchmarks.studies.reordering [--json=FILE] [--check] [--quick] [--write] [--seeds=20]

Simulated steps (log-normal durations, sd 0.3, half of the variance the microbatch's) whose transfers are
drawn one by one, so that microbatches change places on the way. Each step runs with `accumulation="arrival"`
and with "index" and so many spare buffers; the figure is the second makespan over the first. Links:

    measured      log-normal with sd 0.5, the widest that StragglerAnalysis found (p99 = 3.2 x p50)
    exponential   p99 = 6.6 x p50
    heavy         log-normal with sd 1.5 (p99 = 33 x p50)

`in order` is the control: the same transfers, one after another on each directed link, and no spare buffer.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, product, starmap
from statistics import quantiles

from benchmarks.harness import SIMULATED, Aim, finish, parse, put_figures, table
from rrfp_jax.core.admission import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.engine import Links, simulate
from rrfp_jax.sim.families import FORWARD_SECONDS, SHARED, SIGMA
from rrfp_jax.trace.costs import Table, Workload, WorkloadCosts, log_normal

LINKS: Mapping[str, Callable[[random.Random], float]] = {
    "measured": lambda draw: draw.lognormvariate(-(0.5**2) / 2, 0.5),
    "exponential": lambda draw: draw.expovariate(1.0),
    "heavy": lambda draw: draw.lognormvariate(-(1.5**2) / 2, 1.5),
}
"""How long a transfer takes, as a multiple of the mean."""
TRANSFERS = (0.1, 0.5, 1.0)
STAGES, MICROBATCHES = (4, 8, 16), (32, 64)
SCHEDULES, LIMITS = ("bf", "bfw"), (8, 16, 32)

CONTROL = "in order"
SPARES = (0, 1, 2, 4, 8)
COLUMNS = (CONTROL, *map(str, SPARES))

MOST_PERCENT = 2.0
"""What the default may cost with exponential links: it is the smallest number of buffers that keeps to it."""


@dataclass(frozen=True)
class Cell:
    """Steps of one kind; `transfer` is the mean, in forwards."""

    link: str
    transfer: float
    stages: int
    microbatches: int

    def __str__(self) -> str:
        sizes = f"{self.stages} stages, {self.microbatches} microbatches"
        return f"{self.link:11} {self.transfer:3g}, {sizes}"

    def workload(self, seed: int) -> Workload:
        """One of its steps."""
        durations = log_normal(
            self.stages, self.microbatches, forward=FORWARD_SECONDS, sigma=SIGMA, shared=SHARED, seed=seed
        )
        mean, factor, draw = self.transfer * FORWARD_SECONDS, LINKS[self.link], random.Random(seed)

        def drawn() -> Table:
            return tuple(tuple(mean * factor(draw) for _ in row) for row in durations.forward)

        return replace(durations, transfer_forward=drawn(), transfer_backward=drawn())


def measure(cell: Cell, seed: int) -> dict[tuple[str, int], dict[str, float]]:
    """Of one step, by schedule and limit: the ratio of each column."""
    workload = cell.workload(seed)
    placement = Placement(cell.stages)
    costs = WorkloadCosts(workload, placement)

    def makespan(accumulation: Accumulation, spare: int = 0, links: Links = "parallel") -> float:
        rules = StepRules(
            placement=placement,
            microbatches=cell.microbatches,
            schedule=by_name(schedule),
            limit=limit,
            accumulation=accumulation,
            spare_gradients=spare,
        )
        return simulate(rules, costs, links=links).makespan

    found = {}
    for schedule, limit in product(SCHEDULES, LIMITS):
        control = makespan("index", links="serial") / makespan("arrival", links="serial")
        arrival = makespan("arrival")
        ratios = {str(spare): makespan("index", spare) / arrival for spare in SPARES}
        found[schedule, limit] = {CONTROL: control} | ratios
    return found


DETAIL, DETAIL_LIMIT = Cell("", transfer=1.0, stages=8, microbatches=32), 16
"""Whose quartiles the docs show, for all links; the limit is the runtime's default for 8 stages."""


@dataclass(frozen=True)
class Row:
    """One cell under one schedule and limit: quartiles of the ratios over the seeds, by column."""

    cell: Cell
    schedule: str
    limit: int
    ratios: Mapping[str, Sequence[float]]


def rows_of(cell: Cell, steps: Sequence[Mapping[tuple[str, int], Mapping[str, float]]]) -> list[Row]:
    """The quartiles of a cell's steps."""
    rows = []
    for schedule, limit in product(SCHEDULES, LIMITS):
        drawn = {column: [step[schedule, limit][column] for step in steps] for column in COLUMNS}
        quartiles = {column: quantiles(ratios, n=4) for column, ratios in drawn.items()}
        rows.append(Row(cell, schedule, limit, quartiles))
    return rows


def worst(rows: Iterable[Row], column: str) -> float:
    """The largest median."""
    return max(row.ratios[column][1] for row in rows)


def markdown(rows: Sequence[Row]) -> str:
    """Two tables for the docs: the largest medians, and the quartiles of one kind of step."""
    largest: list[tuple[str, ...]] = []
    for (link, transfer), group in groupby(rows, lambda row: (row.cell.link, row.cell.transfer)):
        own = list(group)
        largest.append((link, f"{transfer:g}", *(f"{worst(own, column):.3f}" for column in COLUMNS)))
    buffers, detail = [str(spare) for spare in SPARES], []
    for row in rows:
        if (replace(row.cell, link=""), row.limit) == (DETAIL, DETAIL_LIMIT):
            found = [row.ratios[column] for column in buffers]
            quartiles = [f"{half:.3f} ({low:.2f}-{high:.2f})" for low, half, high in found]
            detail.append((row.cell.link, row.schedule, *quartiles))
    tables = (
        table(["links", "mean transfer", *COLUMNS], largest),
        table(["links", "schedule", *buffers], detail),
    )
    return "\n\n".join(tables)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The control costs nothing; the default is the smallest number of buffers that costs little."""
    usual = [row for row in rows if row.cell.link == "exponential"]
    control = max(abs(ratio - 1) for row in rows for ratio in row.ratios[CONTROL])
    default, fewer = (100 * (worst(usual, str(n)) - 1) for n in (SPARE_GRADIENTS, SPARE_GRADIENTS - 1))
    return [
        Aim("what links that keep order cost, without spare buffers", 100 * control, 1e-7, "%"),
        Aim(f"what {SPARE_GRADIENTS} buffers cost with exponential links", default, MOST_PERCENT, "%"),
        Aim("what one less costs there", fewer, MOST_PERCENT, "%", at_least=True),
    ]


def main() -> int:
    """Run all cells, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="two kinds of steps, three seeds")
    parser.add_argument("--write", action="store_true", help="the tables into results/simulated.md")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="steps of each kind (20)")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds={options.seeds}: quartiles need at least 2")
    cells = list(starmap(Cell, product(LINKS, TRANSFERS, STAGES, MICROBATCHES)))
    if options.quick:
        cells = [replace(DETAIL, link=link) for link in ("exponential", "heavy")]
    seeds = range(3 if options.quick else options.seeds)
    rows: list[Row] = []
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for cell in cells:
            rows += (own := rows_of(cell, list(pool.map(partial(measure, cell), seeds))))
            shown = "  ".join(f"{column}: {worst(own, column):.3f}" for column in COLUMNS)
            print(f"{cell}, largest median  {shown}", flush=True)
    if options.write:
        note = f"Medians of {len(seeds)} paired seeds."
        put_figures(SIMULATED, "reordering", f"\n{note}\n\n{markdown(rows)}\n\n")
    return finish(options, {"rows": [asdict(row) for row in rows]}, aims(rows))


if __name__ == "__main__":
    sys.exit(main())
