"""`schedule="auto"` against the best choice in hindsight, in the simulator: `results/simulated.md`.

    python -m benchmarks.studies.choosing [--json=FILE] [--check] [--write] [--quick]
        [--seeds=5] [--largest=64] [--jobs=N]

The 19 kinds of steps of `cells.py`, each with 0.5 to 2 times the bytes that 1F1B holds. The choice is made by
what is known of a step, as before it runs. Hindsight takes the fastest of all candidates, and of the fixed
orders that fit, in what actually happened, anew for each step: nobody can choose better among these. What is
told is the chosen one's time over the best one's, in the median and at worst of a cell's steps, and the CPU
time of the choice.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from statistics import geometric_mean, median
from time import process_time

from benchmarks.harness import SIMULATED, Aim, finish, parse, put_figures, table
from benchmarks.studies.cells import CELLS, Cell
from benchmarks.studies.simulated import FACTORS, FITS, FIXED, figures_of, seeds_of
from rrfp_jax.core.schedules import by_name
from rrfp_jax.sim.choice import CANDIDATES, Auto
from rrfp_jax.sim.compare import Conditions, choice


@dataclass(frozen=True)
class Chosen:
    """One step with one limit.

    Attributes:
        factor: of the limit over the bytes of 1F1B.
        name: of the hint that was chosen.
        best: of what would have been fastest.
        behind: the time of the one over that of the other.
        cost: CPU time of choosing (s).
    """

    factor: float
    name: str
    best: str
    behind: float
    cost: float


def measure(cell: Cell, seed: int) -> list[Chosen]:
    """Of one step, for every limit that a microbatch fits into."""
    step, found = cell.step(seed), []
    fixed = {name: figures_of(by_name(name), step) for name in FIXED}
    unit = fixed["1f1b"][1]
    for factor in FACTORS:
        limit = math.ceil(factor * unit)
        if max(map(max, step.actual.activation_bytes or ())) > limit:
            continue
        began = process_time()
        chosen = choice(Auto(), step, Conditions(limit=None, byte_limit=limit)).name
        cost = process_time() - began
        times = {name: seconds for name, (seconds, held) in fixed.items() if held <= FITS * factor * unit}
        times |= {name: figures_of(by_name(name), step, limit)[0] for name in CANDIDATES}
        best = min(times, key=times.__getitem__)
        found.append(Chosen(factor, chosen, best, times[chosen] / times[best], cost))
    return found


@dataclass(frozen=True)
class Row:
    """One cell with one limit, over its steps.

    Attributes:
        behind, worst: median and largest of `Chosen.behind`.
        names: what was chosen, the most frequent first.
        cost: of one choice, the largest (s).
    """

    cell: str
    factor: float
    behind: float
    worst: float
    names: Sequence[str]
    cost: float

    @classmethod
    def of(cls, cell: Cell, factor: float, steps: Sequence[Chosen]) -> Row:
        """Of the steps with this limit, at least one."""
        behind = [step.behind for step in steps]
        names = [name for name, _ in Counter(step.name for step in steps).most_common()]
        return cls(cell.changed, factor, median(behind), max(behind), names, max(step.cost for step in steps))

    def __str__(self) -> str:
        what = f"{self.cell:18} {self.factor:4g} x  {self.behind:.3f} (worst {self.worst:.3f})"
        return f"{what}  {self.cost:6.2f} s  {', '.join(self.names)}"


def markdown(rows: Sequence[Row]) -> str:
    """A table of all cells; by limit the median, what was chosen most, and the seconds of the slowest."""
    cells = []
    for cell in dict.fromkeys(row.cell for row in rows):
        own = {row.factor: row for row in rows if row.cell == cell}
        shown = [f"{own[f].behind:.3f} {own[f].names[0]}" if f in own else "-" for f in FACTORS]
        cells.append((cell, *shown, f"{max(row.cost for row in own.values()):.1f}"))
    means = [geometric_mean([row.behind for row in rows if row.factor == factor]) for factor in FACTORS]
    cells.append(("geometric mean", *(f"{mean:.3f}" for mean in means), ""))
    return table(["", *(f"{factor:g} x" for factor in FACTORS), "s"], cells)


def main() -> int:
    """Run all cells, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="two small cells, three seeds")
    parser.add_argument("--write", action="store_true", help="the table into docs/")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="steps of each cell (5)")
    parser.add_argument("--largest", type=int, default=64, metavar="N", help="stages at most (64)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    options = parser.parse_args()
    known = [Cell("4 stages", stages=4), Cell("1 a stage", per_stage=1)] if options.quick else CELLS
    seeds = 3 if options.quick else options.seeds
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for cell in known:
            if cell.stages > options.largest:
                continue
            steps = pool.map(partial(measure, cell), range(seeds_of(cell, seeds)))
            found = [one for step in steps for one in step]
            for factor in FACTORS:
                if own := [one for one in found if one.factor == factor]:
                    rows.append(Row.of(cell, factor, own))
                    print(rows[-1], flush=True)
    if options.write:
        text = f"\nMedians of {seeds} seeds, fewer from 32 stages on.\n\n{markdown(rows)}\n\n"
        put_figures(SIMULATED, "choosing", text)
    cells = {"1F1B's bytes": [row for row in rows if row.factor == 1], "any limit": rows}
    aims = [Aim("choosing, up to 64 stages", max(row.cost for row in rows), 10, "s")]
    for what, of_these in cells.items():
        behind = [100 * (row.behind - 1) for row in of_these]
        aims.append(Aim(f"auto behind the best in hindsight, {what}, median cell", median(behind), 2, "%"))
        aims.append(Aim(f"auto behind the best in hindsight, {what}, worst cell", max(behind), 5, "%"))
    return finish(options, {"rows": [asdict(row) for row in rows]}, aims)


if __name__ == "__main__":
    sys.exit(main())
