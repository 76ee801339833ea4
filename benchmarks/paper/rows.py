"""The figures of arXiv:2605.18750 by simulation: its rows, its smaller tables, and its gain taken apart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Aim, Found, bench, say, table
from benchmarks.lateness import LateReadiness
from benchmarks.paper.model import (
    FITTED,
    ROWS,
    SCHEDULES,
    Machine,
    Row,
    model,
    reduce_seconds,
    workload,
)
from benchmarks.pictures import bars, simulated_against
from benchmarks.steps import held_bytes, simulated
from rrfp_jax.sim.engine import Links
from rrfp_jax.studies.disturbances import Jittered
from rrfp_jax.trace.costs import StepCosts, Workload
from rrfp_jax.trace.jitter import LEVELS
from rrfp_jax.trace.records import StepTrace

LIMIT = 32
"""Microbatches in flight under a hint, the paper's default; or as many as there are stages, if that is more.
With half as many, a pipeline of 64 stages (a row that is fitted) took twice as long as the paper's."""


class How(NamedTuple):
    """How a step is run: by which schedule of ours, over which links; under a hint with so many microbatches
    in flight and bytes of a stage; `exchange` seconds a message beside its transfer."""

    schedule: str
    links: Links
    limit: int | None = LIMIT
    bytes: int | None = None
    exchange: float = 0.0


def paper_ways(row: Row, machine: Machine) -> dict[str, How]:
    """By the paper's names; ZB as ZB-H1, which has the memory of 1F1B.

    Shapes are agreed on only where they differ, so `Machine.exchange` is that of multimodal rows.
    """
    exchange = machine.exchange if model(row.model).vision else 0.0
    return {
        "1F1B": How("1f1b", "synchronous", exchange=exchange),
        "ZB": How("zb-h1", "synchronous", exchange=exchange),
        "BF": How("bf", "serial", max(LIMIT, row.pp)),
        "BFW": How("bfw", "serial", max(LIMIT, row.pp)),
    }


Change = Callable[[StepCosts], StepCosts]
"""What else happens to a step's costs."""


def run(work: Workload, how: How, change: Change | None = None) -> StepTrace:

    def changed(costs: StepCosts) -> StepCosts:
        late = LateReadiness(costs, how.exchange)
        return change(late) if change else late

    return simulated(
        *(how.schedule, work),
        most=how.bytes,
        links=how.links,
        change=changed,
        limit=how.limit,
        accumulation="arrival",
    )


def seconds(row: Row, machine: Machine, how: How, seeds: int) -> float:
    """Mean over so many iterations; an iteration lasts as long as its slowest replica."""
    return fmean(
        max(run(workload(row, machine, seed * row.dp + replica), how).makespan for replica in range(row.dp))
        + reduce_seconds(row, machine)
        for seed in range(seeds)
    )


IMAGES = "benchmarks/results/images"
FITTED_MACHINES = Path(__file__).parent / "fitted.json"
DIFFERENCE, LONGEST, SHARES, GAIN = 1.1, 0.5, (1.0, 0.3), 0.005
"""Factor for slopes; most that a step changes a logarithm; what parts of a step are tried; the share of the
mean square that a step must gain."""
SEEDS = 1
"""Iterations that are simulated for each row while fitting."""


class Form(NamedTuple):
    """Which three numbers are fitted, and from where; the others are as in `start`."""

    free: tuple[str, str, str]
    start: Machine


FORMS: Mapping[str, Form] = {
    "lengths": Form(("flops", "link", "spread"), Machine(50e12, 3e9, 0.6)),
    "exchanges": Form(("flops", "link", "exchange"), Machine(50e12, 3e9, 0.25, 0.01)),
    "layers": Form(("flops", "layer", "exchange"), Machine(60e12, 3e9, 0.25, 0.01, 0.0003, even=True)),
}
"""In the order in which they were tried.

1. Lengths alone cannot explain the paper's 1F1B.
2. So synchronous messages have a price, and lengths vary as DIP measured: 4.15 x between the lightest and the
   heaviest of about 200 is sd 0.25. Then small models come out too fast and large ones too slow.
3. So a layer has a price beside its operations, stages have equal times whatever their layers, and the link
   is as in `start` of the first.

The third was chosen after the held-out rows of the second had been seen, so for its form they are not blind;
its numbers are fitted to the eight rows all the same.
"""


def errors(machine: Machine, seeds: int, row: Row) -> list[float]:
    """log(simulated / paper's) of each column."""
    how, columns = paper_ways(row, machine), zip(SCHEDULES, row.seconds, strict=True)
    return [math.log(seconds(row, machine, how[name], seeds) / theirs) for name, theirs in columns]


class Fitted(NamedTuple):
    """The best machine found, and the root of the mean square of log(simulated / paper's) over the eight
    fitted rows and their four columns; nothing else is fitted."""

    machine: Machine
    rms: float


def fit(form: Form, pool: Executor, told: Callable[[str], None]) -> Fitted:
    rows = sorted((row for row in ROWS if row.name in FITTED), key=lambda row: -row.pp * row.batch)

    def residuals(machine: Machine) -> list[float]:
        found = pool.map(partial(errors, machine, SEEDS), rows)
        return [error for own in found for error in own]

    return least_squares(residuals, form, told)


def least_squares(
    residuals: Callable[[Machine], list[float]], form: Form, told: Callable[[str], None]
) -> Fitted:
    """Where the residuals' mean square is least, by Gauss and Newton in the logarithms of what is free."""
    best, at = form.start, np.array(residuals(form.start))
    while True:
        moved = [residuals(_scaled(best, {name: DIFFERENCE})) for name in form.free]
        slopes = (np.array(moved) - at).T / math.log(DIFFERENCE)
        step = np.clip(np.linalg.lstsq(slopes, -at, rcond=None)[0], -LONGEST, LONGEST)
        for share in SHARES:
            factors = dict(zip(form.free, np.exp(share * step), strict=True))
            new = np.array(residuals(candidate := _scaled(best, factors)))
            if new @ new < (1 - GAIN) * (at @ at):
                break
        else:
            return Fitted(best, float(np.sqrt(np.mean(at**2))))
        best, at = candidate, new
        told(f"rms {np.sqrt(np.mean(at**2)):.4f}  {best}")


def _scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    changed: dict[str, Any] = {name: float(getattr(machine, name) * by) for name, by in factors.items()}
    return replace(machine, **changed)


def write(found: Mapping[str, Fitted]) -> None:

    def rounded(value: float | bool) -> float | bool:
        return value if isinstance(value, bool) else float(f"{value:.4g}")

    kept = {
        form: {name: rounded(value) for name, value in {**asdict(one.machine), "rms": one.rms}.items()}
        for form, one in found.items()
    }
    FITTED_MACHINES.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def fitted() -> dict[str, Fitted]:
    kept = json.loads(FITTED_MACHINES.read_text(encoding="utf-8"))
    return {form: Fitted(rms=own.pop("rms"), machine=Machine(**own)) for form, own in kept.items()}


RATIOS = ("BF", "BFW")
"""Over 1F1B."""


@dataclass(frozen=True)
class Scored:
    """One row; seconds by schedule."""

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
        base = self.simulated["1F1B"] / self.theirs["1F1B"]
        return {name: self.simulated[name] / self.theirs[name] / base - 1 for name in RATIOS}

    @property
    def worst(self) -> float:
        return max(map(abs, self.off.values()))


def score(machine: Machine, seeds: int, row: Row) -> Scored:
    simulated = {name: seconds(row, machine, how, seeds) for name, how in paper_ways(row, machine).items()}
    return Scored(row.name, simulated, dict(zip(SCHEDULES, row.seconds, strict=True)))


def times_error(rows: Sequence[Scored]) -> float:
    return median(abs(off) for row in rows for off in row.off.values())


def ratios_error(rows: Sequence[Scored]) -> float:
    return median(abs(off) for row in rows for off in row.ratios_off.values())


def held_out(rows: Sequence[Scored]) -> list[Scored]:
    return [row for row in rows if not row.fitted]


def scores_table(rows: Sequence[Scored]) -> str:
    """Every row, worst first; simulated seconds with their errors, and those of the ratios."""
    heads = ["row, TP/PP/DP", "", *SCHEDULES, *(f"{name}/1F1B" for name in RATIOS)]
    cells = []
    for row in sorted(rows, key=lambda row: -row.worst):
        times = [f"{row.simulated[name]:.2f} ({row.off[name]:+.0%})" for name in SCHEDULES]
        base, off = row.simulated["1F1B"], row.ratios_off
        ratios = [f"{row.simulated[name] / base:.2f} ({off[name]:+.0%})" for name in RATIOS]
        cells.append((row.name, "fitted" if row.fitted else "held out", *times, *ratios))
    for what, own in (("fitted", [row for row in rows if row.fitted]), ("held out", held_out(rows))):
        times = [f"{median(abs(row.off[name]) for row in own):.0%}" for name in SCHEDULES]
        ratios = [f"{median(abs(row.ratios_off[name]) for row in own):.0%}" for name in RATIOS]
        cells.append(("median error", what, *times, *ratios))
    return table(heads, cells)


# The paper's smaller tables by the same machine. Where it does not say which model a table has, it is our
# guess.

QWEN_4B = "Qwen3-4B + ViT-Big"
UNKNOWN = (0.0, 0.0, 0.0, 0.0)
"""Step times that the paper does not have."""
USUAL = Row(QWEN_4B, 1, 8, 1, 192, UNKNOWN)

BREAKDOWN = {
    1: ((2.581, 0.859), (1.788, 1.020)),
    2: ((2.644, 0.946), (1.824, 1.026)),
    4: ((2.750, 0.938), (1.942, 1.054)),
}
"""Table 3, PP 16, batch 32: by TP, total and compute (s), of 1F1B and of RRFP."""

JITTER = {"J0": (7.19, 4.45), "J1": (7.39, 4.53), "J2": (8.00, 4.75), "J3": (8.49, 4.96)}
"""Table 6, TP 2, PP 8, batch 96: 1F1B and BF (s)."""

HINT_LOSSES = {"bf": 0.0, "fb": 0.0045, "b-priority": 0.0084, "f-priority": 0.0492}
"""Table 7: by which share a step takes longer than with BF."""

SCALING = {
    ("Qwen3-1.7B + ViT-H", 1, 192): {4: 1.07, 8: 1.94, 16: 2.01},
    (QWEN_4B, 2, 64): {4: 1.03, 8: 1.64, 16: 1.72},
    ("LLaMA3-8B + ViT-5B", 1, 64): {8: 1.79, 16: 2.13, 32: 2.31},
}
"""Table 8: 1F1B's time over BF's by PP, for a model, TP and batch."""

LIMITS = (4, 8, 16, 32, 48)
LATE = (0.0001, 0.001, 0.005)
"""Seconds by which readiness is noticed late."""


@dataclass(frozen=True)
class Figure:
    """One figure of a table; `theirs` None where the paper has none."""

    table: str
    what: str
    simulated: float
    theirs: float | None


def breakdown(machine: Machine) -> list[Figure]:
    """Seconds that a stage computes, and in which it does not, in the mean."""
    found = []
    for tp, both in BREAKDOWN.items():
        row = Row(QWEN_4B, tp, 16, 1, 32, UNKNOWN)
        for name, (total, compute) in zip(("1F1B", "BF"), both, strict=True):
            trace = run(workload(row, machine, 0), paper_ways(row, machine)[name])
            busy = fmean(trace.busy(stage) for stage in range(trace.stages))
            what, blocks = f"TP {tp}, {name}", 1 - busy / trace.makespan
            found += [
                Figure("breakdown", f"{what}: total, s", trace.makespan, total),
                Figure("breakdown", f"{what}: share that blocks", blocks, 1 - compute / total),
            ]
    return found


def jitter(machine: Machine) -> list[Figure]:
    """How much longer a step gets by injected delays."""
    row = Row(QWEN_4B, 2, 8, 1, 96, UNKNOWN)
    work, found = workload(row, machine, 0), []
    for place, name in enumerate(("1F1B", "BF")):
        plain = run(work, paper_ways(row, machine)[name]).makespan
        for level in LEVELS:
            delayed = partial(Jittered, level=LEVELS[level], seed=0)
            seconds = run(work, paper_ways(row, machine)[name], delayed).makespan
            theirs = JITTER[level][place] / JITTER["J0"][place]
            found.append(Figure("jitter", f"{name}, {level}: over J0", seconds / plain, theirs))
    return found


def hints(machine: Machine) -> list[Figure]:
    """Other hints over BF, BF's limits (the paper saw no gain from 16 on), and arrivals noticed late."""
    work = workload(USUAL, machine, 0)

    def took(name: str, limit: int = LIMIT, late: float = 0.0) -> float:
        return run(work, How(name, "serial", limit), partial(LateReadiness, seconds=late)).makespan

    bf, most = took("bf"), took("bf", max(LIMITS))
    return [
        *(
            Figure("hints", f"{name} over bf", took(name) / bf, 1 + more)
            for name, more in HINT_LOSSES.items()
        ),
        *(Figure("limits", f"{n} in flight over 48", took("bf", n) / most, None) for n in LIMITS),
        *(Figure("late", f"noticed {1e3 * s:g} ms late", took("bf", late=s) / bf, None) for s in LATE),
    ]


def scaling(machine: Machine) -> list[Figure]:
    """1F1B's time over BF's with more stages."""
    found = []
    for (name, tp, batch), by_stages in SCALING.items():
        for stages, theirs in by_stages.items():
            row = Row(name, tp, stages, 1, batch, UNKNOWN)
            work = workload(row, machine, 0)
            slow, fast = (run(work, paper_ways(row, machine)[which]).makespan for which in ("1F1B", "BF"))
            found.append(Figure("scaling", f"{name}, TP {tp}, PP {stages}", slow / fast, theirs))
    return found


TABLES = (breakdown, jitter, hints, scaling)


def figures_table(figures: Sequence[Figure]) -> str:
    """All of them, with the paper's beside them."""
    cells = [
        (f.table, f.what, f"{f.simulated:.2f}", "-" if f.theirs is None else f"{f.theirs:.2f}")
        for f in figures
    ]
    return table(["table", "figure", "simulated", "paper"], cells)


GAIN_PARTS = ("messages", "order", "memory")
SPLIT = (
    *("GPT3-Large 1/8/1", "GPT3-Large 1/16/1", "Qwen3-1.7B + ViT-H 1/8/1", "Qwen3-1.7B + ViT-H 1/16/1"),
    *("Qwen3-4B + ViT-Big 1/8/1", "Qwen3-4B + ViT-Big 2/16/1", "LLaMA3-8B + ViT-5B 2/16/1"),
    "Qwen3-32B + InternViT 2/32/1",
)
"""Rows that are taken apart, one replica each."""


@dataclass(frozen=True)
class Split:
    """One row under one hint, in seconds. Differences of its neighbours are the gain's parts:

        synchronous   1F1B with synchronous messages, the paper's baseline
        asynchronous  1F1B, asynchronous messages: the difference is that of the *messages*
        equal         the hint at 1F1B's bytes: the *order*
        free          the hint as the paper has it, 32 in flight: the *memory*

    `held` is the last one's most bytes on a stage, over those of 1F1B.
    """

    row: str
    hint: str
    synchronous: float
    asynchronous: float
    equal: float
    free: float
    held: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """What messages, order and memory gain, in shares of synchronous 1F1B's time."""
        times = (self.synchronous, self.asynchronous, self.equal, self.free)
        messages, order, memory = ((before - after) / self.synchronous for before, after in pairwise(times))
        return messages, order, memory


def taken_apart(machine: Machine, row: Row) -> list[Split]:
    work, how = workload(row, machine, 0), paper_ways(row, machine)
    synchronous = run(work, how["1F1B"]).makespan
    plain = run(work, How("1f1b", "serial"))
    unit = held_bytes(plain, work)
    found = []
    for hint in RATIOS:
        free = run(work, how[hint])
        equal = run(work, how[hint]._replace(bytes=math.ceil(unit)))
        held = held_bytes(free, work) / unit
        times = (synchronous, plain.makespan, equal.makespan, free.makespan)
        found.append(Split(row.name, hint, *times, held))
    return found


def splits_table(splits: Sequence[Split]) -> str:
    cells = []
    for one in splits:
        parts = [f"{part:.0%}" for part in (*one.parts, sum(one.parts))]
        cells.append((one.row, one.hint, f"{one.synchronous:.2f}", *parts, f"{one.held:.1f} x"))
    return table(["row, TP/PP/DP", "hint", "1F1B, s", *GAIN_PARTS, "together", "bytes held"], cells)


def _scored(pool: Executor, forms: Mapping[str, Fitted], best: str, seeds: int, quick: bool) -> Found:
    which = sorted(ROWS[:4] if quick else ROWS, key=lambda row: -row.pp * row.batch)  # long ones first
    cells, found = [], {}
    for form, (machine, rms) in forms.items():
        found[form] = scored = list(pool.map(partial(score, machine, seeds), which))
        own = held_out(scored)
        numbers = f"{machine.flops / 1e12:.1f}", f"{machine.link / 1e9:.2f}", f"{machine.spread:.2f}"
        prices = f"{1e3 * machine.exchange:.1f}", f"{1e3 * machine.layer:.2f}"
        cells.append(
            (form, *numbers, *prices, f"{rms:.0%}", f"{times_error(own):.1%}", f"{ratios_error(own):.1%}")
        )
    heads = ["form", "TFLOP/s", "link, GB/s", "spread", "exchange, ms", "layer, ms", "fitted rows, rms"]
    text = table([*heads, "held out: times", "held out: ratios"], cells)
    points = {
        name: [(row.theirs[name], row.simulated[name], not row.fitted) for row in found[best]]
        for name in SCHEDULES
    }
    title = "filled: held out; hollow: fitted; "
    own = held_out(found[best])
    return Found(
        {form: [asdict(one) for one in scored] for form, scored in found.items()},
        [
            Aim("held-out rows, median error of step times", 100 * times_error(own), 15, "%"),
            Aim("held-out rows, median error of the ratios", 100 * ratios_error(own), 10, "%"),
        ],
        {"proof.md rows": f"{text}\n\n{scores_table(found[best])}"},
        {f"{IMAGES}/proof-rows.svg": simulated_against("the paper's iteration", points, title, 0.15)},
    )


def _smaller(pool: Executor, machine: Machine, quick: bool) -> Found:
    """Tables 3, 6, 7 and 8, and what is not in the paper."""
    jobs = [pool.submit(one, machine) for one in (TABLES[2:3] if quick else TABLES)]
    figures = [figure for job in jobs for figure in job.result()]
    return Found([asdict(one) for one in figures], (), {"proof.md tables": figures_table(figures)})


def _ablation(pool: Executor, machine: Machine, quick: bool) -> Found:
    which = [row for row in ROWS if row.name in SPLIT][: 1 if quick else None]
    splits = [one for own in pool.map(partial(taken_apart, machine), which) for one in own]
    rows = [
        {"name": f"{one.row}, {one.hint}", "part": part, "value": value}
        for one in splits
        for part, value in zip(GAIN_PARTS, one.parts, strict=True)
    ]
    label = "share of synchronous 1F1B's time that is saved"
    return Found(
        [asdict(one) | {"parts": one.parts} for one in splits],
        [] if quick else [Aim("rows taken apart", len(which), 6, "", at_least=True)],
        {"proof.md ablation": splits_table(splits)},
        {f"{IMAGES}/proof-split.svg": bars(rows, label)},
    )


@bench(
    "Do the paper's figures come out of three fitted numbers, and where does its gain come from?",
    minutes="5, 13 with --refit *",
    aims="held-out rows: step times 15 % off in the median, ratios 10 %; 6 rows taken apart",
)
def paper(
    part: tuple[str, ...] = ("rows", "tables", "ablation"),
    quick: bool = False,
    refit: bool = False,
    seeds: int = 1,
    jobs: int = 0,
) -> Found:
    """20 rows from the models' published sizes, what is assumed where the paper is silent (`model.py`), and
    three numbers that were fitted to eight rows and are scored on the 12 others; `--refit` fits them again.
    Then the paper's smaller tables, and its gain taken apart."""
    with ProcessPoolExecutor(jobs or None) as pool:
        if refit:
            write({name: fit(form, pool, say) for name, form in FORMS.items()})
        kept = fitted()
        best = min(kept, key=lambda form: kept[form].rms)
        machine, steps = kept[best].machine, 1 if quick else seeds
        runs: Mapping[str, Callable[[], Found]] = {
            "rows": lambda: _scored(pool, kept, best, steps, quick),
            "tables": lambda: _smaller(pool, machine, quick),
            "ablation": lambda: _ablation(pool, machine, quick),
        }
        found = {name: runs[name]() for name in part}
    return Found(
        {"machines": {form: asdict(one.machine) for form, one in kept.items()}}
        | {name: one.figures for name, one in found.items()},
        [aim for one in found.values() for aim in one.aims],
        {place: text for one in found.values() for place, text in one.tables.items()},
        {path: draw for one in found.values() for path, draw in one.pictures.items()},
    )
