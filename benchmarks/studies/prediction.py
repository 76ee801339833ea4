"""What a run recorded predicts the step times of runs that differ from it.

    python -m benchmarks.studies.prediction [--part=paced|computed] [--json=FILE] [--check] [--quick]
        [--write] [--steps=FILE]

*Paced*: ten runs of four processes on paced devices. They differ in the schedule, the limit on microbatches
in flight, the split, or the lengths of the microbatches; every run has noise of its own, 3 % a task. One
stage is slow and one link. *Computed*: the runs of `benchmarks.runtime.computed`, two processes with a core
each that train a small model. The step time of every run is predicted from each of the others alone
(`observed.py`), and compared with the median that was measured. `--steps` takes the steps of a file that an
earlier `benchmarks.runtime.computed --steps` wrote, and runs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from statistics import median

from benchmarks.harness import RESULTS, Aim, finish, parse, parts_flag, percent_longer, put_figures, table
from benchmarks.runtime.blocks import BLOCK_SECONDS, Paced
from benchmarks.runtime.computed import ROUNDS, sitting
from benchmarks.runtime.paced import run_paced
from benchmarks.studies.observed import Observed
from benchmarks.studies.pictures import simulated_against
from rrfp_jax.report.store import read_steps
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RecordedStep

PROOF = RESULTS / "proof.md"
IMAGES = PROOF.parent / "images"

AIMS = {"paced": (5.0, 10.0), "computed": (10.0, 20.0)}
"""Median and worst error of the pairs (%)."""

STEPS, WARM_UP = 8, 2
"""Of a paced run, and how many of them do not count."""

SHORT, MIDDLE, LONG = 0.5, 1.0, 2.0
MIXED = (SHORT, MIDDLE, MIDDLE, LONG, SHORT, MIDDLE, SHORT, LONG)
MOSTLY_LONG = (LONG, SHORT, LONG, MIDDLE, LONG, LONG, SHORT, MIDDLE)
"""Of half a step's microbatches."""

Runs = Mapping[str, Sequence[RecordedStep]]
"""The steps of every run."""


def paced_runs() -> Iterator[tuple[str, Paced]]:
    """All of them, by what they are called."""
    slowness = (1.0, 1.0, 1.2, 1.0)
    base = Paced(seed=0, lengths=MIXED + MIXED[::-1], slowness=slowness, link=1, link_seconds=0.01)
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


def paced_steps(run: Paced) -> list[RecordedStep]:
    """The steps of a paced run, with what it is allowed to know: lengths and layers."""
    steps = [step.recorded for step in run_paced(run.workload, run.schedule, run.limit, STEPS)[WARM_UP:]]
    placement = steps[0].rules.placement
    halves = [2 * run.split[placement.place(v)[0]] // placement.chunks for v in range(placement.last + 1)]
    work = Work([LayerWork("Block", BLOCK_SECONDS / 2, 1)] * sum(halves), halves)
    names = [f"{length:g}" for length in run.lengths]
    return [replace(step, buckets=names, work=lambda: work) for step in steps]


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
    last = ("measured, ms", *(f"{measured[name]:.0f}" for name in names))
    return table(["predicted from", *names], [*cells, last])


def aims_of(part: str, found: Sequence[Pair]) -> list[Aim]:
    """Of a part."""
    off = [abs(pair.off) for pair in found]
    worst = max(found, key=lambda pair: abs(pair.off))
    middle, most = AIMS[part]
    return [
        Aim(f"{part}: prediction off by, median", median(off), middle, "%"),
        Aim(f"{part}: worst ({worst.of}, from {worst.known})", max(off), most, "%"),
    ]


def runs_of(part: str, quick: bool, steps: Path | None) -> Runs:
    """Run them, or take those of a file."""
    if part == "computed":
        if steps is None:
            return sitting(1 if quick else ROUNDS)
        return {name: [step.recorded for step in own] for name, own in read_steps(steps).items()}
    found = {}
    for name, run in list(paced_runs())[: 2 if quick else None]:
        found[name] = paced_steps(run)
        print(f"{name}: {1e3 * median(step.trace.makespan for step in found[name]):.1f} ms", flush=True)
    return found


def main() -> int:
    """Run all, predict, print, write."""
    parser = parse(__doc__)
    parts_flag(parser, AIMS)
    parser.add_argument("--quick", action="store_true", help="two paced runs, one round of computed ones")
    parser.add_argument("--write", action="store_true", help="the tables into results/proof.md")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="computed ones of an earlier time")
    options = parser.parse_args()
    figures, aims = {}, []
    for part in options.part or AIMS:
        found = pairs(runs_of(part, options.quick, options.steps))
        print(shown := markdown(found))
        if options.write:
            link = f"![predicted beside measured](images/proof-prediction-{part}.svg)"
            put_figures(PROOF, f"prediction, {part}", f"\n{link}\n\n{shown}\n\n")
            points = {part: [(pair.measured, pair.predicted, True) for pair in found]}
            picture = IMAGES / f"proof-prediction-{part}.svg"
            simulated_against("measured", points, "a point for each pair; ", AIMS[part][1] / 100, picture)
        figures[part] = [asdict(pair) | {"off": pair.off} for pair in found]
        aims += aims_of(part, found)
    return finish(options, figures, aims)


if __name__ == "__main__":
    sys.exit(main())
