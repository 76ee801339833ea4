"""Readiness-first on the variability that others have measured (`measured.py`): `results/proof.md`.

    python -m benchmarks.studies.families [--json=FILE] [--check] [--quick] [--write] [--seeds=4] [--jobs=N]

Twelve kinds of steps, 8 and 16 stages, four microbatches a stage, each with the bytes that 1F1B holds on its
fullest stage in the same step. Hints are held to these bytes. Rivals: the fixed orders that fit, and orders
*planned* for the step with one chunk a stage and with two in a V, by simulating what is known of it. Besides
the usual hints, one ranks by the better of these plans: readiness-first where all is known. Beside them is a
bound: no order of the step's tasks, whatever it knows and holds, is faster (`sim/bounds.py`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from statistics import median

from benchmarks.harness import RESULTS, Aim, finish, parse, put_figures, table
from benchmarks.studies.measured import CELLS, SIZES, UNKNOWN, MeasuredCell
from benchmarks.studies.pictures import ratios
from benchmarks.studies.simulated import FITS, FIXED, HINTS, Figures, figures_of
from rrfp_jax.core.hints import BF, Ranked
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.bounds import lower_bound
from rrfp_jax.sim.compare import byte_budgets
from rrfp_jax.sim.families import Step
from rrfp_jax.sim.planned import Plan, plan
from rrfp_jax.trace.costs import WorkloadCosts

PROOF = RESULTS / "proof.md"
IMAGES = PROOF.parent / "images"
PLANNED = ("planned", "planned-v")
"""Orders for a step with one chunk a stage, and with two in a V."""
RANKED_PLAN = "ranked:planned"
RIVALS = (*FIXED, *PLANNED)
OURS = (*HINTS, RANKED_PLAN)
REFERENCE = "1f1b"
BOUND = "no order is faster"
EVALUATIONS = 30
"""Simulations for a plan, about ten of them those of its candidates."""


def measure(cell: MeasuredCell, seed: int) -> dict[str, Figures]:
    """Of one step: makespan (s) and bytes over those of 1F1B, by schedule; without what cannot run."""
    step = cell.step(seed)
    found = {name: figures_of(by_name(name), step) for name in FIXED}
    unit = found[REFERENCE][1]
    limit = math.ceil(unit)
    if max(map(max, step.actual.activation_bytes or ())) <= limit:
        found |= {name: figures_of(by_name(name), step, limit) for name in HINTS}
        plans = planned(step, limit)
        found |= {name: figures_of(own.order, step) for name, own in plans.items()}
        best = min(plans.values(), key=attrgetter("makespan"))
        found[RANKED_PLAN] = figures_of(Ranked(best.order), step, limit)
    found[BOUND] = bound(step), unit
    return {name: (seconds, held / unit) for name, (seconds, held) in found.items()}


def bound(step: Step) -> float:
    """Seconds that no order of a step takes less than, on any placement of the rivals."""
    stages, microbatches = step.actual.stages, step.actual.microbatches
    placements = Placement(stages), Placement(stages, 2), Placement(stages, 2, "v")
    return min(
        lower_bound(
            StepRules(placement=placement, microbatches=microbatches, schedule=BF()),
            WorkloadCosts(step.actual, placement),
            any_split=True,
        )
        for placement in placements
    )


def planned(step: Step, limit: int) -> dict[str, Plan]:
    """The orders that are found by simulating what is known of a step, within so many bytes a stage."""
    stages, microbatches = step.known.stages, step.known.microbatches
    found = {}
    for name, placement in zip(PLANNED, (Placement(stages), Placement(stages, 2, "v")), strict=True):
        rules = StepRules(placement=placement, microbatches=microbatches, schedule=BF())
        budgets = byte_budgets(step.known, limit, placement.chunks)
        costs = WorkloadCosts(step.known, placement)
        found[name] = plan(rules, costs, evaluations=EVALUATIONS, budgets=budgets)
    return found


@dataclass(frozen=True)
class Row:
    """One kind of step with one number of stages.

    Attributes:
        times: by schedule that fits, over 1F1B's; medians over the steps.
        hint, rival: the fastest of each.
        held: most bytes that a hint held, over the limit.
        bound: no order's time is below, over 1F1B's.
    """

    kind: str
    stages: int
    times: Mapping[str, float]
    hint: str
    rival: str
    held: float
    bound: float

    @property
    def over_rival(self) -> float:
        """The best hint's time over that of the best rival that fits."""
        return self.times[self.hint] / self.times[self.rival]

    @property
    def most(self) -> float:
        """The bound over the best rival's time: further ahead nobody can be."""
        return self.bound / self.times[self.rival]


def row_of(cell: MeasuredCell, found: Sequence[dict[str, Figures]]) -> Row:
    """The medians over the steps of a kind."""
    names = [name for name in (*RIVALS, *OURS) if all(name in step for step in found)]
    fits = [name for name in names if name not in FIXED or median(step[name][1] for step in found) <= FITS]
    times = {name: median(step[name][0] / step[REFERENCE][0] for step in found) for name in fits}
    hint, rival = (
        min((name for name in own if name in times), key=times.__getitem__) for own in (OURS, RIVALS)
    )
    held = max(step[name][1] for step in found for name in OURS)
    least = median(step[BOUND][0] / step[REFERENCE][0] for step in found)
    return Row(cell.changed, cell.stages, times, hint, rival, held, least)


def markdown(rows: Sequence[Row], seeds: int) -> str:
    """The kinds, worst for readiness-first first."""
    said = f"Step times over 1F1B's, medians of {seeds} steps, on 16 stages of half as many; at 1F1B's bytes."
    heads = ["steps", "stages", "best rival", "", "best hint", "", "hint / rival", "bound / rival"]
    cells = []
    for row in sorted(rows, key=lambda row: -row.over_rival):
        times = [text for name in (row.rival, row.hint) for text in (f"`{name}`", f"{row.times[name]:.3f}")]
        kind = f"{row.kind} (unknown)" if row.kind in UNKNOWN else row.kind
        cells.append((kind, row.stages, *times, f"{row.over_rival:.3f}", f"{row.most:.3f}"))
    return f"{said}\n\n{table(heads, cells)}"


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Never far behind; ahead where nobody knew."""
    unknown = [row.over_rival for row in rows if row.kind in UNKNOWN]
    return [
        Aim("best hint's time over the best rival's, worst kind", max(r.over_rival for r in rows), 1.01, "x"),
        Aim("the same, median of the kinds that nobody knew", median(unknown), 0.95, "x"),
        Aim("bytes of hints over the limit", max(row.held for row in rows), 1 + 1e-6, "x"),
    ]


def main() -> int:
    """Run all kinds, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="three kinds on 8 stages, one step each")
    parser.add_argument("--write", action="store_true", help="the table into results/proof.md")
    parser.add_argument(
        "--seeds", type=int, default=4, metavar="N", help="steps of each kind (4), half on 16 stages"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    options = parser.parse_args()
    cells = CELLS[:3] if options.quick else CELLS
    seeds = 1 if options.quick else options.seeds
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for cell in cells:
            steps = range(0, seeds, cell.stages // SIZES[0])
            rows.append(row := row_of(cell, list(pool.map(partial(measure, cell), steps))))
            shown = "  ".join(f"{name} {time:.3f}" for name, time in row.times.items())
            print(f"{row.kind:11} {row.stages:3} stages: {row.over_rival:.3f}  {shown}", flush=True)
    most = median(row.most for row in rows if row.kind in UNKNOWN) if not options.quick else 0.0
    print(f"no order could be further ahead than {most:.3f} x in that median")
    if options.write:
        put_figures(PROOF, "families", f"\n{markdown(rows, seeds)}\n\n")
        worst_first = sorted(rows, key=lambda row: -row.over_rival)
        bars = {f"{r.kind}, {r.stages} stages": (r.over_rival, r.kind in UNKNOWN) for r in worst_first}
        label = "best hint's time over the best rival's (blue: nobody knew)"
        ratios(bars, label, IMAGES / "proof-families.svg")
    return finish(options, {"rows": [asdict(row) for row in rows]}, aims(rows))


if __name__ == "__main__":
    sys.exit(main())
