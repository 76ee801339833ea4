"""Does the simulator predict? Real compute beside it, and runs beside what another run recorded."""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import optax
from numpy.typing import NDArray

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, on_ranks, percent_longer, say, table
from benchmarks.observed import Observed
from benchmarks.paced import run_paced
from benchmarks.pictures import simulated_against
from benchmarks.report import BLOCK_SECONDS, Blocks
from benchmarks.steps import held_microbatches
from configs.quickstart import pipeline
from models import gpt
from rrfp_jax.report.store import read_steps, write_steps
from rrfp_jax.runtime.run.join import join
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RecordedStep

IMAGES = "benchmarks/results/images"
RANKS, WARM_UP, ROUNDS, LIMIT_SECONDS = 2, 1, 6, 900.0
"""Processes, one stage each; rounds that do not count, and that do."""

MODEL = gpt.GPTConfig(d_model=128, n_heads=4, d_ff=384, n_layers=8, embed_scale=0.5)
ROWS, LENGTHS, SHARES = 2, (64, 128, 256), (0.35, 0.4, 0.25)
"""Sequences of a microbatch; their tokens, and how often a microbatch has so many."""

ALIKE = 2.0
"""Schedules that are less than so many per cent apart have no order."""

Layout = tuple[tuple[int, ...], int | None]
"""What a trainer is made for: layers of each virtual stage, and most microbatches in flight under a hint."""

PLAIN, FOLDED, OTHERWISE = ((5, 5), None), ((3, 2, 2, 3), None), ((6, 4), 3)


@dataclass(frozen=True)
class Case:
    """A schedule on so many microbatches."""

    schedule: str
    microbatches: int
    layout: Layout = PLAIN

    @property
    def name(self) -> str:
        split, limit = self.layout
        other = f", split {'-'.join(map(str, split))}, limit {limit}" if limit else ""
        return f"{self.schedule} {self.microbatches}{other}"


COMPARED = tuple(
    Case(name, count, layout)
    for count in (8, 16)
    for layout, names in ((PLAIN, ("1f1b", "bf", "bfw")), (FOLDED, ("zb-v", "ranked:zb-v")))
    for name in names
)
CASES = (*COMPARED, *(Case(name, 16, OTHERWISE) for name in ("bf", "bfw")))

Arrays = Mapping[str, NDArray[np.generic]]
Runs = Mapping[str, Sequence[RecordedStep]]
"""The steps of every run."""


def microbatches(count: int, number: int) -> list[Arrays]:
    """Random tokens of drawn lengths; equal ones for equal arguments. Every length occurs."""
    draw = random.Random(f"{count} {number}")
    lengths = [*LENGTHS, *draw.choices(LENGTHS, SHARES, k=count - len(LENGTHS))]
    draw.shuffle(lengths)
    drawn = np.random.default_rng((count, number))
    found: list[Arrays] = []
    for length in lengths:
        tokens = drawn.integers(MODEL.vocab_size, size=(ROWS, length + 1), dtype=np.int32)
        mask = np.ones((ROWS, length), np.float32)
        found.append({"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy(), "mask": mask})
    return found


def train_cases(file: str, rounds: int) -> None:
    """All cases in turns, on the same microbatches in the same round; all ranks do the same."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():  # and those that they will start
        os.sched_setaffinity(int(thread.name), {cores[int(os.environ["RRFP_RANK"]) % len(cores)]})
    world = join()
    trainers: dict[Layout, rrfp.Trainer] = {}
    found: dict[str, list[RecordedStep]] = defaultdict(list)
    for number in range(-WARM_UP, rounds):
        for case in CASES:
            if case.layout not in trainers:
                split, limit = case.layout
                trainers[case.layout] = rrfp.Trainer(
                    pipeline(MODEL),
                    optax.adamw(1e-3),
                    mesh=rrfp.Mesh(pp=RANKS),
                    schedule=case.schedule,
                    split=split,
                    settings=rrfp.Settings(max_in_flight=limit),
                )
            trainer = trainers[case.layout]
            trainer.schedule = case.schedule
            data = microbatches(case.microbatches, number + WARM_UP)
            trainer.step(data)  # the first one after a change of the schedule begins late
            report = trainer.step(data)
            if number >= 0:
                found[case.name].append(report.recorded)
            if world.rank == 0:
                say(f"round {number}, {case.name}: {1e3 * report.step_seconds:.1f} ms")
    if world.rank == 0:
        write_steps(Path(file), found)


def sitting(rounds: int, keep: str = "") -> Runs:
    """The steps of all cases, by name, of so many rounds; kept in a file if one is named."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(keep or Path(folder) / "steps.json").resolve()
        on_ranks(RANKS, train_cases, str(file), rounds, seconds=LIMIT_SECONDS)
        return _read(file)


def _read(file: Path) -> Runs:
    return read_steps(file)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A schedule on so many microbatches: seconds of a step, medians over the rounds; microbatches held."""

    schedule: str
    microbatches: int
    real: float
    simulated: float
    held: float


@bench(
    "Real compute in two processes, a core each: which schedule is fastest, and is it what was simulated?",
    minutes="4 *",
    aims="schedules in the order simulated; 10 % off at most",
)
def computed(quick: bool = False, steps: str = "") -> Found:
    """A small GPT, two stages, 8 and 16 microbatches of 64 to 256 tokens a sequence. Every process is pinned
    to a core, where its stage computes and its host decides and sends. Schedules take turns, round by round,
    on the same microbatches. Beside the median step stands the one simulated from what the tasks and messages
    of the same schedule took (`observed.py`). `--steps=FILE` keeps the steps, for `prediction`."""
    found, rows = sitting(1 if quick else ROUNDS, steps), []
    for case in COMPARED:
        own = found[case.name]
        rows.append(
            Row(
                schedule=case.schedule,
                microbatches=case.microbatches,
                real=median(step.trace.makespan for step in own),
                simulated=median(map(Observed(own).predicted, own)),
                held=max(held_microbatches(step.trace) for step in own),
            )
        )
    others = swapped(rows)
    base = {row.microbatches: row for row in rows if row.schedule == "1f1b"}
    cells = [
        (
            *(row.microbatches, f"`{row.schedule}`"),
            *(f"{1e3 * row.real:.0f}", f"{row.real / base[row.microbatches].real:.3f}"),
            *(f"{1e3 * row.simulated:.0f}", f"{row.simulated / base[row.microbatches].simulated:.3f}"),
            f"{row.held:g}",
        )
        for row in rows
    ]
    heads = ["microbatches", "schedule", "real, ms", "over 1F1B's", "simulated, ms", "over 1F1B's", "held"]
    points = {
        f"{n} microbatches": [(r.real, r.simulated, True) for r in rows if r.microbatches == n] for n in base
    }
    off = max(abs(percent_longer(row.real, row.simulated)) for row in rows)
    named = f"pairs in another order than simulated ({'; '.join(others) or 'none'})"
    link = "![simulated beside measured](images/proof-computed.svg)"
    drawn = simulated_against("measured", points, "a point for each schedule; ", 0.1)
    return Found(
        {"cases": [asdict(row) for row in rows]},
        [
            Aim(named, len(others), 0, "pairs"),
            Aim("largest difference of real and simulated", off, 10.0, "%"),
        ],
        {"proof.md computed": f"{link}\n\n{table(heads, cells)}"},
        {f"{IMAGES}/proof-computed.svg": drawn},
    )


def swapped(rows: Sequence[Row]) -> list[str]:
    """Schedules that stand in another order than simulated, and are not alike."""
    found = []
    for one, other in combinations(rows, 2):
        real, expected = percent_longer(one.real, other.real), percent_longer(one.simulated, other.simulated)
        apart = real * expected < 0 and min(abs(real), abs(expected)) > ALIKE
        if apart and one.microbatches == other.microbatches:
            found.append(f"{one.schedule} and {other.schedule}, {one.microbatches} microbatches")
    return found


AIMS = {"paced": (5.0, 10.0), "computed": (10.0, 20.0)}
"""Median and worst error of the pairs (%)."""

PACED_STEPS, PACED_WARM_UP = 8, 2
SHORT, MIDDLE, LONG = 0.5, 1.0, 2.0
MIXED = (SHORT, MIDDLE, MIDDLE, LONG, SHORT, MIDDLE, SHORT, LONG)
MOSTLY_LONG = (LONG, SHORT, LONG, MIDDLE, LONG, LONG, SHORT, MIDDLE)
"""Of half a step's microbatches."""


def paced_runs() -> Iterator[tuple[str, Blocks]]:
    """All of them, by what they are called; one stage is slow and one link."""
    slowness = (1.0, 1.0, 1.2, 1.0)
    base = Blocks(seed=0, lengths=MIXED + MIXED[::-1], slowness=slowness, link=1, link_seconds=0.01)
    others, uneven = MOSTLY_LONG + MOSTLY_LONG[::-1], (6, 6, 4, 4)
    runs = {
        "bf": base,
        "bf, limit 4": replace(base, limit=4),
        "bf, split 6-6-4-4": replace(base, split=uneven),
        "1f1b": replace(base, schedule="1f1b"),
        "1f1b, other lengths, split 6-6-4-4": replace(base, schedule="1f1b", lengths=others, split=uneven),
        "bfw": replace(base, schedule="bfw"),
        "bfw, other lengths": replace(base, schedule="bfw", lengths=others),
        "zb-h1": replace(base, schedule="zb-h1"),
        "zb-v": replace(base, schedule="zb-v"),
        "ranked:zb-v, limit 4": replace(base, schedule="ranked:zb-v", limit=4),
    }
    for seed, (name, run) in enumerate(runs.items()):
        yield name, replace(run, seed=seed)


def _paced_steps(run: Blocks) -> list[RecordedStep]:
    """The steps of a paced run, with what it is allowed to know: lengths and layers."""
    timed = run_paced(run.workload, run.schedule, run.limit, PACED_STEPS)[PACED_WARM_UP:]
    placement = timed[0].recorded.rules.placement
    halves = [2 * run.split[placement.place(v)[0]] // placement.chunks for v in range(placement.last + 1)]
    work = Work([LayerWork("Block", BLOCK_SECONDS / 2, 1)] * sum(halves), halves)
    names = [f"{length:g}" for length in run.lengths]
    return [replace(step.recorded, buckets=names, work=lambda: work) for step in timed]


@dataclass(frozen=True)
class Pair:
    """Two runs: seconds of a step of the second one, predicted from the first and measured."""

    known: str
    of: str
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """By which the prediction is longer (%)."""
        return percent_longer(self.predicted, self.measured)


@bench(
    "How far is the step time of one run predicted from what another recorded?",
    minutes="5 and 4 *",
    aims="paced 5 % off in the median and 10 % at worst, computed 10 % and 20 %",
)
def prediction(part: tuple[str, ...] = tuple(AIMS), quick: bool = False, steps: str = "") -> Found:
    """*Paced*: ten runs of four processes that differ in the schedule, the limit on microbatches in flight,
    the split, or the lengths; every run has noise of its own, 3 % a task. *Computed*: the runs of `computed`.
    Every run is predicted from each of the others alone (`observed.py`), and compared with the median
    measured. `--steps` takes the steps of an earlier `computed --steps`, and runs nothing."""
    paced = dict(list(paced_runs())[: 2 if quick else None])
    runs: Mapping[str, Callable[[], Runs]] = {
        "computed": lambda: _read(Path(steps)) if steps else sitting(1 if quick else ROUNDS),
        "paced": lambda: {name: _paced_steps(run) for name, run in paced.items()},
    }
    figures: dict[str, Any] = {}
    aims, tables, pictures = [], {}, {}
    for name in part:
        found = pairs(runs[name]())
        link = f"![predicted beside measured](images/proof-prediction-{name}.svg)"
        tables[f"proof.md prediction, {name}"] = f"{link}\n\n{markdown(found)}"
        points = {name: [(pair.measured, pair.predicted, True) for pair in found]}
        drawn = simulated_against("measured", points, "a point for each pair; ", AIMS[name][1] / 100)
        pictures[f"{IMAGES}/proof-prediction-{name}.svg"] = drawn
        figures[name] = [asdict(pair) | {"off": pair.off} for pair in found]
        aims += aims_of(name, found)
    return Found(figures, aims, tables, pictures)


def pairs(runs: Runs) -> list[Pair]:
    """All runs, each from each of the others; medians of the steps."""
    found = []
    for known, of in permutations(runs, 2):
        observed, steps = Observed(runs[known]), runs[of]
        different = {tuple(step.buckets): step for step in steps}
        predicted = {buckets: observed.predicted(step) for buckets, step in different.items()}
        expected = median(predicted[tuple(step.buckets)] for step in steps)
        found.append(Pair(known, of, expected, median(step.trace.makespan for step in steps)))
    return found


def markdown(found: Sequence[Pair]) -> str:
    """How far predictions are off, run by run."""
    names = list(dict.fromkeys(pair.known for pair in found))
    off = {(pair.known, pair.of): pair.off for pair in found}
    cells = [(known, *(f"{off[known, of]:+.1f}" if known != of else "" for of in names)) for known in names]
    measured = {pair.of: 1e3 * pair.measured for pair in found}
    return table(
        ["predicted from", *names], [*cells, ("measured, ms", *(f"{measured[name]:.0f}" for name in names))]
    )


def aims_of(part: str, found: Sequence[Pair]) -> list[Aim]:
    worst = max(found, key=lambda pair: abs(pair.off))
    middle, most = AIMS[part]
    return [
        Aim(f"{part}: prediction off by, median", median(abs(pair.off) for pair in found), middle, "%"),
        Aim(f"{part}: worst ({worst.of}, from {worst.known})", abs(worst.off), most, "%"),
    ]
