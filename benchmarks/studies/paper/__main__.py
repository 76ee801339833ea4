"""The figures of arXiv:2605.18750 by simulation: `results/proof.md`.

    python -m benchmarks.studies.paper [--json=FILE] [--check] [--quick] [--write] [--fit]
        [--part=rows|tables|ablation] [--seeds=1] [--jobs=N]

20 rows from the models' published sizes (`published.py`), what is assumed where the paper is silent
(`workloads.py`), and three numbers that were fitted to eight rows and are scored on the 12 others (`fit.py`).
`--fit` fits them again. Then the paper's smaller tables, and its gain taken apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from benchmarks.harness import Aim, finish, parse, parts_flag, put_figures, table
from benchmarks.studies.families import IMAGES, PROOF
from benchmarks.studies.paper import ablation, scores, tables
from benchmarks.studies.paper.fit import FORMS, Fitted, fit, fitted, write
from benchmarks.studies.paper.published import ROWS, SCHEDULES
from benchmarks.studies.paper.workloads import Machine
from benchmarks.studies.pictures import simulated_against, stacked


class Asked(NamedTuple):
    """What the parts of the command get.

    Attributes:
        pool: of processes.
        fitted: by form.
        form: the one with the least error on the fitted rows; it stands for the machine.
        seeds: iterations of each row.
        quick, write: see the flags.
    """

    pool: Executor
    fitted: Mapping[str, Fitted]
    form: str
    seeds: int
    quick: bool
    write: bool

    @property
    def machine(self) -> Machine:
        """That stands for the paper's."""
        return self.fitted[self.form].machine


Part: TypeAlias = tuple[str, Any, list[Aim]]
"""Its tables, figures, and aims."""


def rows(asked: Asked) -> Part:
    """All rows under every form."""
    which = sorted(ROWS[:4] if asked.quick else ROWS, key=lambda row: -row.pp * row.batch)  # long ones first
    cells, found = [], {}
    for form, (machine, rms) in asked.fitted.items():
        scored = list(asked.pool.map(partial(scores.score, machine, asked.seeds), which))
        own = scores.held_out(scored)
        errors = (scores.times_error(own), scores.ratios_error(own))
        cells.append((form, *_shown(machine), f"{rms:.0%}", *(f"{error:.1%}" for error in errors)))
        found[form] = scored
    heads = ["form", "TFLOP/s", "link, GB/s", "spread", "exchange, ms", "layer, ms", "fitted rows, rms"]
    heads += ["held out: times", "held out: ratios"]
    scored = found[asked.form]
    text = f"{table(heads, cells)}\n\n{scores.markdown(scored)}"
    if asked.write:
        points = {
            name: [(row.theirs[name], row.simulated[name], not row.fitted) for row in scored]
            for name in SCHEDULES
        }
        title = "filled: held out; hollow: fitted; "
        simulated_against("the paper's iteration", points, title, 0.15, IMAGES / "proof-rows.svg")
    own = scores.held_out(scored)
    aims = [
        Aim("held-out rows, median error of step times", 100 * scores.times_error(own), 15, "%"),
        Aim("held-out rows, median error of the ratios", 100 * scores.ratios_error(own), 10, "%"),
    ]
    return text, {form: [asdict(one) for one in scored] for form, scored in found.items()}, aims


def _shown(machine: Machine) -> tuple[str, ...]:
    return (
        f"{machine.flops / 1e12:.1f}",
        f"{machine.link / 1e9:.2f}",
        f"{machine.spread:.2f}",
        f"{1e3 * machine.exchange:.1f}",
        f"{1e3 * machine.layer:.2f}",
    )


def smaller_tables(asked: Asked) -> Part:
    """Tables 3, 6, 7 and 8, and what is not in the paper."""
    which: Sequence[Callable[[Machine], list[tables.Figure]]] = tables.TABLES
    jobs = [asked.pool.submit(table, asked.machine) for table in (which[2:3] if asked.quick else which)]
    figures = [figure for job in jobs for figure in job.result()]
    return tables.markdown(figures), [asdict(figure) for figure in figures], []


def taken_apart(asked: Asked) -> Part:
    """The gain of rows, split."""
    which = ablation.rows()[: 1 if asked.quick else None]
    splits = [one for own in asked.pool.map(partial(ablation.split, asked.machine), which) for one in own]
    if asked.write:
        bars = {f"{one.row}, {one.hint}": one.parts for one in splits}
        label = "share of synchronous 1F1B's time that is saved"
        stacked(bars, ablation.PARTS, label, IMAGES / "proof-split.svg")
    aims = [] if asked.quick else [Aim("rows taken apart", len(which), 6, "", at_least=True)]
    return ablation.markdown(splits), [asdict(one) | {"parts": one.parts} for one in splits], aims


PARTS: Mapping[str, Callable[[Asked], Part]] = {
    "rows": rows,
    "tables": smaller_tables,
    "ablation": taken_apart,
}


def main() -> int:
    """Run the parts, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows of each part, one iteration each")
    parser.add_argument("--write", action="store_true", help="the tables into results/proof.md")
    parser.add_argument("--fit", action="store_true", help="fit the three numbers again, and keep them")
    parts_flag(parser, PARTS)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="iterations of each row (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    aims: list[Aim] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        if options.fit:
            write({name: fit(form, pool, partial(print, flush=True)) for name, form in FORMS.items()})
        kept = fitted()
        best = min(kept, key=lambda form: kept[form].rms)
        seeds = 1 if options.quick else options.seeds
        asked = Asked(pool, kept, best, seeds, options.quick, options.write)
        for name in options.part or PARTS:
            text, figures[name], own = PARTS[name](asked)
            aims += own
            print(f"\n{text}\n", flush=True)
            if options.write:
                put_figures(PROOF, name, f"\n{text}\n\n")
    return finish(options, {"machines": {n: asdict(one.machine) for n, one in kept.items()}, **figures}, aims)


if __name__ == "__main__":
    sys.exit(main())
