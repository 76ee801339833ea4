"""What adding gradients in microbatch order costs where messages overtake one another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, product, starmap
from statistics import median, quantiles
from typing import Any

from benchmarks.harness import Aim, Found, bench, percent_longer, say, side_by_side, table
from benchmarks.paced import PacedCase
from benchmarks.steps import simulated
from rrfp_jax.core.admission import SPARE_GRADIENTS
from rrfp_jax.studies.families import FORWARD_SECONDS, SHARED, SIGMA
from rrfp_jax.trace.costs import Table, Workload, log_normal

LINKS: Mapping[str, Callable[[random.Random], float]] = {
    "measured": lambda draw: draw.lognormvariate(-(0.5**2) / 2, 0.5),  # the widest that others found
    "exponential": lambda draw: draw.expovariate(1.0),
    "heavy": lambda draw: draw.lognormvariate(-(1.5**2) / 2, 1.5),
}
"""How long a transfer takes, as a multiple of the mean; p99 is 3.2, 6.6 and 33 times p50."""

TRANSFERS, STAGES, MICROBATCHES = (0.1, 0.5, 1.0), (4, 8, 16), (32, 64)
SCHEDULES, LIMITS = ("bf", "bfw"), (8, 16, 32)
CONTROL = "in order"
SPARES = (0, 1, 2, 4, 8)
COLUMNS = (CONTROL, *map(str, SPARES))
MOST_PERCENT = 2.0
"""What the default may cost with exponential links: it is the smallest number of buffers that keeps to it."""

Quartiles = tuple["Cell", str, int, Mapping[str, Sequence[float]]]
"""A cell under one schedule and limit: quartiles of the ratios over the seeds, by column."""


@dataclass(frozen=True)
class Cell:
    """Steps of one kind; `transfer` is the mean, in forwards."""

    link: str
    transfer: float
    stages: int
    microbatches: int

    def workload(self, seed: int) -> Workload:
        durations = log_normal(
            self.stages, self.microbatches, forward=FORWARD_SECONDS, sigma=SIGMA, shared=SHARED, seed=seed
        )
        mean, factor, draw = self.transfer * FORWARD_SECONDS, LINKS[self.link], random.Random(seed)

        def drawn() -> Table:
            return tuple(tuple(mean * factor(draw) for _ in row) for row in durations.forward)

        return replace(durations, transfer_forward=drawn(), transfer_backward=drawn())


DETAIL, DETAIL_LIMIT = Cell("", transfer=1.0, stages=8, microbatches=32), 16
"""Whose quartiles the page shows, for all links; the limit is the runtime's default for 8 stages."""


@bench(
    "What does adding gradients in microbatch order cost where messages overtake one another?",
    minutes="over 10 *",
    aims=f"nothing where links keep order; {MOST_PERCENT:g} % with the default, more with one buffer less",
)
def reordering(quick: bool = False, seeds: int = 20) -> Found:
    """Simulated steps whose transfers are drawn one by one. Each runs with `accumulation="arrival"` and with
    "index" and so many spare buffers; the figure is the second makespan over the first. `in order` is the
    control: the same transfers, one after another on each directed link, and no spare buffer."""
    cells = list(starmap(Cell, product(LINKS, TRANSFERS, STAGES, MICROBATCHES)))
    if quick:
        cells = [replace(DETAIL, link=link) for link in ("exponential", "heavy")]
    count = 3 if quick else max(seeds, 2)
    rows: list[Quartiles] = []
    for cell in cells:
        rows += (own := rows_of(cell, side_by_side(partial(measure, cell), range(count))))
        shown = "  ".join(f"{column}: {worst(own, column):.3f}" for column in COLUMNS)
        say(f"{cell}, largest median  {shown}")
    figures = [
        {"cell": asdict(cell), "schedule": schedule, "limit": limit, "ratios": ratios}
        for cell, schedule, limit, ratios in rows
    ]
    usual = [row for row in rows if row[0].link == "exponential"]
    control = max(abs(ratio - 1) for row in rows for ratio in row[3][CONTROL])
    default, fewer = (100 * (worst(usual, str(n)) - 1) for n in (SPARE_GRADIENTS, SPARE_GRADIENTS - 1))
    aims = [
        Aim("what links that keep order cost, without spare buffers", 100 * control, 1e-7, "%"),
        Aim(f"what {SPARE_GRADIENTS} buffers cost with exponential links", default, MOST_PERCENT, "%"),
        Aim("what one less costs there", fewer, MOST_PERCENT, "%", at_least=True),
    ]
    note = f"Medians of {count} paired seeds."
    return Found({"rows": figures}, aims, {"simulated.md reordering": f"{note}\n\n{markdown(rows)}"})


PACED_CASES = (
    (Cell("exponential", 1.0, 8, 32), "bf", 16),
    (Cell("heavy", 0.5, 8, 32), "bfw", 16),
    (Cell("heavy", 1.0, 4, 32), "bf", 8),
    (Cell("heavy", 1.0, 4, 32), "bfw", 8),
)


@bench(
    "What does that cost on paced devices, in real processes with real messages?",
    minutes="-",
    aims="3 % off what was simulated",
)
def reordering_paced(quick: bool = False, seeds: int = 3) -> Found:
    """Some steps of `reordering`: `arrival`, then `index` with so many spare buffers, in turns. Step times
    are over those of `arrival` on the same step, medians over the seeds, beside the same simulated with the
    runs' own hops. Other work on the machine can be seen in single runs."""
    rows: list[dict[str, Any]] = []
    for cell, schedule, limit in PACED_CASES[-1:] if quick else PACED_CASES:
        steps: dict[int, list[tuple[float, float]]] = {spare: [] for spare in SPARES[:-1]}
        for seed in range(1 if quick else seeds):
            case = partial(PacedCase, workload=cell.workload(seed), schedule=schedule, limit=limit)
            base = _times(case(accumulation="arrival"))
            for spare, ratios in steps.items():
                own = _times(case(spare_gradients=spare))
                ratios.append((own[0] / base[0], own[1] / base[1]))
        for spare, ratios in steps.items():
            real, expected = (median(of) for of in zip(*ratios, strict=True))
            about = {"cell": asdict(cell), "schedule": schedule, "limit": limit, "spare": spare}
            rows.append(about | {"real": real, "simulated": expected, "steps": ratios})
            say(f"{cell}, {schedule:3}, limit {limit}, {spare} spare: {real:.3f}, simulated {expected:.3f}")
    off = max(abs(percent_longer(row["real"], row["simulated"])) for row in rows)
    aim = Aim("largest difference of the median ratios, real and simulated", off, 3.0, "%")
    return Found({"medians": rows}, [aim])


def _times(case: PacedCase) -> tuple[float, float]:
    """A step's seconds, real and simulated."""
    run = case.run()
    return median(run.steps), case.simulated(run.hop).makespan


def measure(cell: Cell, seed: int) -> dict[tuple[str, int], dict[str, float]]:
    """Of one step, by schedule and limit: the ratio of each column."""
    workload, found = cell.workload(seed), {}
    for schedule, limit in product(SCHEDULES, LIMITS):
        run = partial(simulated, schedule, workload, limit=limit)
        control = run(accumulation="index", spare_gradients=0, links="serial").makespan
        ratios = {CONTROL: control / run(accumulation="arrival", links="serial").makespan}
        arrival = run(accumulation="arrival").makespan
        for spare in SPARES:
            ratios[str(spare)] = run(accumulation="index", spare_gradients=spare).makespan / arrival
        found[schedule, limit] = ratios
    return found


def rows_of(cell: Cell, steps: Sequence[Mapping[tuple[str, int], Mapping[str, float]]]) -> list[Quartiles]:
    return [
        (cell, *key, {name: quantiles([step[key][name] for step in steps], n=4) for name in COLUMNS})
        for key in product(SCHEDULES, LIMITS)
    ]


def worst(rows: Iterable[Quartiles], column: str) -> float:
    return max(ratios[column][1] for *_, ratios in rows)


def markdown(rows: Sequence[Quartiles]) -> str:
    """Two tables: the largest medians, and the quartiles of one kind of step."""
    largest, detail = [], []
    for (link, transfer), group in groupby(rows, lambda row: (row[0].link, row[0].transfer)):
        own = list(group)
        largest.append((link, f"{transfer:g}", *(f"{worst(own, column):.3f}" for column in COLUMNS)))
    for cell, schedule, limit, ratios in rows:
        if (replace(cell, link=""), limit) == (DETAIL, DETAIL_LIMIT):
            found = [ratios[str(spare)] for spare in SPARES]
            quartiles = [f"{half:.3f} ({low:.2f}-{high:.2f})" for low, half, high in found]
            detail.append((cell.link, schedule, *quartiles))
    heads = ["links", "mean transfer", *COLUMNS], ["links", "schedule", *map(str, SPARES)]
    return f"{table(heads[0], largest)}\n\n{table(heads[1], detail)}"
