"""Readiness-first in the simulator: against its rivals, at limits in bytes, and how well it is chosen.

All get the same steps (paired seeds). Devices are alike, so what the fullest stage needs all have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import geometric_mean, median
from time import process_time
from typing import Any

from benchmarks.harness import Aim, Found, bench, say, side_by_side, table
from benchmarks.pictures import curves
from benchmarks.steps import CELLS, Cell, Figures, figures_of, plan_within
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.choice import CANDIDATES, Auto
from rrfp_jax.studies.compare import Conditions, choice, compare
from rrfp_jax.studies.families import Step

FIXED = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-zb", "v-half", "v-min", "dualpipe-v")
HINTS = ("bfw", "ranked:zb-v", "ranked:v-zb", "ranked:v-half", "ranked:v-min", "ranked:zb-h2")
PLANNED = "planned"
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
REFERENCE = "zb-v"
"""Followed strictly; all times are over its."""

FITS = 1.001
"""A fixed order is a rival if it holds no more than so many times the limit, in the median."""

EVALUATIONS, FEWEST, PLANNED_TASKS = 100, 12, 150_000
"""A planner simulates a step 100 times, fewer times if these would be more tasks; all candidates at least."""

LARGE = 16**2 * 4
"""Squares of the stages times microbatches a stage from which on fewer steps are simulated."""


def _cells(quick: bool, largest: int) -> list[Cell]:
    known = [Cell("4 stages", stages=4), Cell("1 a stage", per_stage=1)] if quick else CELLS
    return [cell for cell in known if cell.stages <= largest]


def _seeds_of(cell: Cell, seeds: int) -> range:
    return range(min(seeds, max(1, seeds * LARGE // (cell.stages**2 * cell.per_stage))))


def _fits(step: Step, limit: int) -> bool:
    return max(map(max, step.actual.activation_bytes or ())) <= limit


@bench(
    "Where does readiness-first win, and where does it lose?",
    minutes="-",
    aims="best hint over the best that fits 1.01, with fewer bytes 1.02; over ZB-V 0.97, over BFW 0.88",
)
def simulated(
    quick: bool = False, planned: bool = False, seeds: int = 20, largest: int = 64, jobs: int = 0
) -> Found:
    """19 kinds of steps, each with 0.5 to 2 times the bytes that 1F1B holds on its fullest stage in the same
    step. Fixed orders are followed strictly, whatever they hold; they count as rivals where that fits. With
    `--planned`, which takes 100 simulations a step more, also the best of all orders with one chunk a stage
    at 1F1B's bytes, improved by simulating what is known of the step."""
    rows: list[Row] = []
    count = 3 if quick else seeds
    for cell in _cells(quick, largest):
        found = side_by_side(partial(measure, planned, cell), _seeds_of(cell, count), jobs)
        for factor in FACTORS:
            rows.append(row := row_of(cell, factor, found))
            shown = "  ".join(f"{name} {time:.3f}" for name, time in row.times.items())
            say(f"{cell.changed:18} {factor:4g} x  {shown}")
    note = f"Medians of {count} paired seeds, fewer from 32 stages on. A dash: more bytes than that."
    parts = [
        f"### {factor:g} times the bytes of 1F1B\n\n{_table([row for row in rows if row.factor == factor])}"
        for factor in FACTORS
    ]
    return Found(
        {"rows": [asdict(row) for row in rows]},
        _aims(rows),
        {"simulated.md figures": "\n\n".join([note, *parts]), "simulated.md fastest": _fastest(rows)},
        {"docs/images/simulated.svg": _picture(rows)},
    )


def measure(planned: bool, cell: Cell, seed: int) -> dict[str, dict[str, Figures]]:
    """Of one step: the fixed orders as "fixed", and by factor what was limited; without what cannot run."""
    step = cell.step(seed)
    fixed = {name: figures_of(name, step) for name in FIXED}
    unit = fixed["1f1b"][1]
    found: dict[str, dict[str, Figures]] = {"fixed": fixed}
    for factor in FACTORS:
        limit = math.ceil(factor * unit)
        own = {name: figures_of(name, step, limit) for name in HINTS} if _fits(step, limit) else {}
        if planned and factor == 1 and own:
            evaluations = max(FEWEST, PLANNED_TASKS // (2 * cell.stages**2 * cell.per_stage))
            own_plan = plan_within(step, limit, Placement(cell.stages), min(EVALUATIONS, evaluations))
            own[PLANNED] = figures_of(own_plan.order, step)
        found[f"{factor:g}"] = own
    return {what: {name: (t, held / unit) for name, (t, held) in own.items()} for what, own in found.items()}


@dataclass(frozen=True)
class Row:
    """One cell at one memory, medians over the seeds: times by schedule over those of strict ZB-V, of fixed
    orders only those that fit; bytes on the fullest stage over those of 1F1B, the most of all steps for
    hints."""

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
    steps = [step["fixed"] | step[f"{factor:g}"] for step in found]
    names = [name for name in (*FIXED, PLANNED, *HINTS) if all(name in step for step in steps)]
    held = {name: (median if name in FIXED else max)(step[name][1] for step in steps) for name in names}
    fits = [name for name in names if name not in FIXED or held[name] <= factor * FITS]
    times = {name: median(step[name][0] / step[REFERENCE][0] for step in steps) for name in fits}
    return Row(cell.changed, factor, times, held)


def _table(rows: Sequence[Row]) -> str:
    names = [name for name in (*FIXED, PLANNED, *HINTS) if any(name in row.times for row in rows)]

    def shown(time: float | None, best: float) -> str:
        return "-" if time is None else f"**{time:.3f}**" if time == best else f"{time:.3f}"

    cells = [
        (row.cell, *(shown(row.times.get(name), min(row.times.values(), default=0.0)) for name in names))
        for row in rows
    ]
    return table(
        ["", *names], [*cells, ("geometric mean", *(shown(_mean(rows, name), 0.0) for name in names))]
    )


SHOWN = ("sd 0", "base", "sd 0.6", "length-imbalanced", "transfers 1", "slow-link", "straggler")
"""Kinds of steps in the table of the fastest."""


def _fastest(rows: Sequence[Row]) -> str:
    """By memory and kind of step the fastest that fits; 1F1B, as it is with its own memory, last."""
    found = {(row.cell, row.factor): row.times for row in rows}
    kinds = [kind for kind in SHOWN if (kind, 1.0) in found]
    cells: list[tuple[str, ...]] = []
    for factor in FACTORS:
        times = [found[kind, factor] for kind in kinds]
        best = [min(own, key=own.__getitem__) for own in times]
        cells.append((f"{factor:g}", *(f"`{n}` {own[n]:.3f}" for n, own in zip(best, times, strict=True))))
    cells.append(("1F1B", *(f"{found[kind, 1.0]['1f1b']:.3f}" for kind in kinds)))
    return table(["bytes", *kinds], cells)


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """Over all cells; None if it does not fit in some."""
    times = [row.times.get(name, 0.0) for row in rows]
    return geometric_mean(times) if all(times) else None


def _picture(rows: Sequence[Row]) -> Any:
    """Geometric means over all kinds of steps; a schedule is drawn where it can run in all of them."""
    by_factor = {factor: [row for row in rows if row.factor == factor] for factor in FACTORS}
    lines = [
        {"x": factor, "y": mean, "name": name}
        for name in HINTS
        for factor, own in by_factor.items()
        if (mean := _mean(own, name)) is not None
    ]
    widest = by_factor[FACTORS[-1]]
    points = [
        {"x": median(row.bytes[name] for row in widest), "y": mean, "name": name}
        for name in FIXED
        if (mean := _mean(widest, name)) is not None
    ]
    title = f"Geometric means over {len(widest)} kinds of steps; squares are followed strictly"
    return curves(lines, points, title)


def _aims(rows: Sequence[Row]) -> list[Aim]:
    """Readiness-first at equal bytes: never far behind, clearly ahead on average, and within its bytes."""
    equal = [row for row in rows if row.factor == 1]
    little = max(row.behind for row in rows if row.factor < 1)
    best = geometric_mean([row.times[name] for row in equal if (name := row.best(HINTS)) is not None])
    bfw = geometric_mean([row.times["bfw"] for row in equal])
    most = max(row.bytes[name] / row.factor for row in rows for name in HINTS if name in row.bytes)
    return [
        Aim("best hint's time over the best that fits, worst cell", max(r.behind for r in equal), 1.01, "x"),
        Aim("the same at 0.5 and 0.75 times the bytes", little, 1.02, "x"),
        Aim("best hint's time over strict ZB-V's, geometric mean", best, 0.97, "x"),
        Aim("best hint's time over BFW's, geometric mean", best / bfw, 0.88, "x"),
        Aim("bytes of hints over the limit", most, 1 + 1e-6, "x"),
    ]


LIMITED, LIMITS, PER_STAGE = ("bf", "bfw"), (1.0, 1.5, 2.0, 4.0), 8
LIMITED_CELLS = tuple(
    cell
    for stages in (4, 8)
    for cell in (
        Cell("log-normal, sd 0.3", stages, PER_STAGE),
        Cell("log-normal, sd 0.6", stages, PER_STAGE, sigma=0.6),
        Cell("length-imbalanced", stages, PER_STAGE, family="length-imbalanced"),
        Cell("multimodal", stages, PER_STAGE, family="multimodal"),
    )
)
COLUMNS = (*(f"{factor:g} x" for factor in LIMITS), "bytes", "1f1b")


@bench(
    "What does a limit in bytes cost?",
    minutes="2 *",
    aims="no more held than the limit; 1.05 times as long at 4 times 1F1B's bytes",
)
def budgets(quick: bool = False, seeds: int = 20) -> Found:
    """Simulated steps of 8 microbatches a stage whose lengths vary. Every stage may hold so many times the
    bytes that 1F1B holds on its fullest stage. Makespans are over the same schedule's without a limit."""
    count, rows = 3 if quick else seeds, []
    for cell in LIMITED_CELLS[: 4 if quick else None]:
        found = side_by_side(partial(limited, cell), range(count))
        for name in LIMITED:
            figures = {column: median(step[name][column] for step in found) for column in COLUMNS}
            figures["most"] = max(step[name]["most"] for step in found)
            rows.append((cell.changed, cell.stages, name, figures))
            say(f"{cell.changed:18} {cell.stages} stages, {name:3} {figures}")
    heads = ["steps", "stages", "schedule", *COLUMNS[:-2], "held without a limit", "1F1B's time"]
    cells = [(*what, *(f"{own[column]:.3f}" for column in COLUMNS)) for *what, own in rows]
    return Found(
        {"rows": [{"steps": s, "stages": n, "schedule": name, "figures": own} for s, n, name, own in rows]},
        [
            Aim("largest share of a limit that was held", max(own["most"] for *_, own in rows), 1.0, "x"),
            Aim("time at 4 x, largest median", max(own["4 x"] for *_, own in rows), 1.05, "x"),
        ],
        {"simulated.md budgets": f"Medians of {count} paired seeds.\n\n{table(heads, cells)}"},
    )


def limited(cell: Cell, seed: int) -> dict[str, dict[str, float]]:
    """Of one step, by schedule: by factor the makespan over that without a limit; 1F1B's as "1f1b"; as
    "bytes" what is held without a limit over what 1F1B holds; as "most" the largest share of a limit used."""
    step, unlimited = cell.step(seed), Conditions(limit=None)
    baseline = compare({"1f1b": by_name("1f1b")}, [step], unlimited)["1f1b"]
    assert baseline.bytes is not None
    schedules = {name: by_name(name) for name in LIMITED}
    free = compare(schedules, [step], unlimited)
    found = {
        name: {
            "1f1b": baseline.makespan / outcome.makespan,
            "bytes": (outcome.bytes or 0.0) / baseline.bytes,
            "most": 0.0,
        }
        for name, outcome in free.items()
    }
    for factor in LIMITS:
        limit = math.ceil(factor * baseline.bytes)
        for name, outcome in compare(schedules, [step], Conditions(limit=None, byte_limit=limit)).items():
            found[name][f"{factor:g} x"] = outcome.makespan / free[name].makespan
            found[name]["most"] = max(found[name]["most"], (outcome.bytes or 0.0) / limit)
    return found


@bench(
    "How far is `schedule=auto` from the best choice in hindsight, and what does choosing take?",
    minutes="-",
    aims="10 s of choosing; 2 % behind in the median cell, 5 % in the worst",
)
def choosing(quick: bool = False, seeds: int = 5, largest: int = 64, jobs: int = 0) -> Found:
    """The 19 kinds of steps of `simulated`. The choice is made by what is known of a step, as before it runs.
    Hindsight takes the fastest of all candidates, and of the fixed orders that fit, in what happened, anew
    for each step. Times are the chosen one's over the best one's; costs are CPU time."""
    count, rows = 3 if quick else seeds, []
    for cell in _cells(quick, largest):
        steps = side_by_side(partial(chosen, cell), _seeds_of(cell, count), jobs)
        for factor in FACTORS:
            if own := [one for step in steps for one in step if one["factor"] == factor]:
                behind = [one["behind"] for one in own]
                names = [name for name, _ in Counter(one["name"] for one in own).most_common()]
                row = {"cell": cell.changed, "factor": factor, "behind": median(behind)}
                rows.append(row | {"worst": max(behind), "names": names, "cost": max(o["cost"] for o in own)})
                say(rows[-1])
    aims = [Aim("choosing, up to 64 stages", max(row["cost"] for row in rows), 10, "s")]
    for what, of_these in {"1F1B's bytes": [r for r in rows if r["factor"] == 1], "any limit": rows}.items():
        behind = [100 * (row["behind"] - 1) for row in of_these]
        aims.append(Aim(f"auto behind the best in hindsight, {what}, median cell", median(behind), 2, "%"))
        aims.append(Aim(f"auto behind the best in hindsight, {what}, worst cell", max(behind), 5, "%"))
    note = f"Medians of {count} seeds, fewer from 32 stages on."
    return Found({"rows": rows}, aims, {"simulated.md choosing": f"{note}\n\n{_chosen_table(rows)}"})


def chosen(cell: Cell, seed: int) -> list[dict[str, Any]]:
    """Of one step, for every limit that a microbatch fits into."""
    step, found = cell.step(seed), []
    fixed = {name: figures_of(name, step) for name in FIXED}
    unit = fixed["1f1b"][1]
    for factor in FACTORS:
        limit = math.ceil(factor * unit)
        if not _fits(step, limit):
            continue
        began = process_time()
        name = choice(Auto(), step, Conditions(limit=None, byte_limit=limit)).name
        cost = process_time() - began
        times = {other: seconds for other, (seconds, held) in fixed.items() if held <= FITS * factor * unit}
        times |= {other: figures_of(other, step, limit)[0] for other in CANDIDATES}
        best = min(times, key=times.__getitem__)
        behind = times[name] / times[best]
        found.append({"factor": factor, "name": name, "best": best, "behind": behind, "cost": cost})
    return found


def _chosen_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """By limit the median and what was chosen most; the seconds of the slowest choice."""
    cells = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = {row["factor"]: row for row in rows if row["cell"] == cell}
        shown = [f"{own[f]['behind']:.3f} {own[f]['names'][0]}" if f in own else "-" for f in FACTORS]
        cells.append((cell, *shown, f"{max(row['cost'] for row in own.values()):.1f}"))
    behind = [[row["behind"] for row in rows if row["factor"] == factor] for factor in FACTORS]
    cells.append(("geometric mean", *(f"{geometric_mean(own):.3f}" if own else "-" for own in behind), ""))
    return table(["", *(f"{factor:g} x" for factor in FACTORS), "s"], cells)
