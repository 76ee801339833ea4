"""Does the report name what spoils a run, and what undoing it gains?

    python -m benchmarks.runtime.spoilt [--json=FILE] [--check] [--seeds=11,12,13] [--cases=NAME,...]

Six runs of four processes are each spoilt in one known way, and run once more without that: an uneven split,
a slow rank, a slow link, a small limit on microbatches in flight, unequal lengths, late data. The seed says
which stage, rank or link it is, and how bad. The report of the spoilt run must name it, and what it says
would be saved must be what was saved.

Devices are paced: a machine of few cores cannot compute for four. What the blocks of a stage take is told to
the device and, as shapes say it of a model, to the report. Late data is that of the quickstart, which
computes. The first steps of a run are left out.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import Aim, finish, parse
from benchmarks.runtime.blocks import MICROBATCHES, STAGES, STEPS, WARM_UP, Paced
from benchmarks.runtime.paced import run_steps
from rrfp_jax.report.causes import Finding
from rrfp_jax.report.explanation import TimedStep, explain
from rrfp_jax.report.sentence import ways_of
from rrfp_jax.trace.idleness import stage_times


@dataclass(frozen=True)
class Computed:
    """A run of the quickstart, the loading of whose microbatches takes so many seconds more."""

    load_seconds: float = 0.0

    def run(self) -> Sequence[TimedStep]:
        """Its steps after the first ones."""
        with tempfile.TemporaryDirectory() as folder:
            fields = {"load_seconds": self.load_seconds, "steps": STEPS, "validation_steps": 1}
            return run_steps("benchmarks/runtime/late_data.py", Path(folder), fields)[WARM_UP:]


@dataclass(frozen=True)
class Case:
    """A way to spoil a run: the run, the same without that, and whether a finding names what is wrong."""

    spoilt: Paced | Computed
    undone: Paced | Computed
    named: Callable[[Finding], bool]


def uneven_split(draw: random.Random, seed: int) -> Case:
    """One stage has blocks of all others."""
    stage, more = draw.randrange(STAGES), draw.choice((1, 2))
    split = tuple(5 + (STAGES - 1) * more if s == stage else 5 - more for s in range(STAGES))

    def named(found: Finding) -> bool:
        return found.kind == "split" and found.sentence.startswith(f"Stage {stage} has ")

    return Case(Paced(split=split, seed=seed), Paced(seed=seed), named)


def slow_rank(draw: random.Random, seed: int) -> Case:
    """The tasks of one rank take longer."""
    rank, factor = draw.randrange(STAGES), draw.uniform(1.4, 2.0)
    slowness = tuple(factor if s == rank else 1.0 for s in range(STAGES))
    spoilt = Paced(slowness=slowness, seed=seed)
    return Case(spoilt, Paced(seed=seed), lambda found: (found.kind, found.subject) == ("stage", rank))


def slow_link(draw: random.Random, seed: int) -> Case:
    """Messages between two stages take long, there and back."""
    link = draw.randrange(STAGES - 1)
    spoilt = Paced(link=link, link_seconds=draw.uniform(0.04, 0.08), seed=seed)

    def named(found: Finding) -> bool:
        return found.kind == "link" and {*ways_of(found.subject)} <= {(link, link + 1), (link + 1, link)}

    return Case(spoilt, Paced(seed=seed), named)


def small_limit(draw: random.Random, seed: int) -> Case:
    """Few microbatches may be in flight."""
    spoilt = Paced(limit=draw.choice((2, 3)), seed=seed)
    return Case(spoilt, Paced(limit=MICROBATCHES, seed=seed), lambda found: found.kind == "in flight")


def unequal_lengths(draw: random.Random, seed: int) -> Case:
    """Microbatches of unequal lengths, whose mean is that of equal ones."""
    drawn = [draw.choice((0.25, 0.5, 1.0, 3.0)) for _ in range(MICROBATCHES)]
    mean = sum(drawn) / MICROBATCHES
    spoilt = Paced(lengths=tuple(length / mean for length in drawn), seed=seed)
    return Case(spoilt, Paced(seed=seed), lambda found: found.kind == "lengths")


def late_data(draw: random.Random, seed: int) -> Case:
    """Loading a step takes longer than the step."""
    spoilt = Computed(draw.uniform(0.06, 0.1))
    return Case(spoilt, Computed(), lambda found: found.kind == "data")


CASES: Mapping[str, Callable[[random.Random, int], Case]] = {
    "uneven split": uneven_split,
    "slow rank": slow_rank,
    "slow link": slow_link,
    "small limit": small_limit,
    "unequal lengths": unequal_lengths,
    "late data": late_data,
}


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        right: whether the sentence names it.
        predicted, measured: what undoing it saves of a step, by the report and by the other run.
        unaccounted: the most that a stage's causes and its computing miss of a step's makespan, as a share.
    """

    case: str
    seed: int
    sentence: str
    right: bool
    predicted: float
    measured: float
    unaccounted: float

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was gained."""
        return abs(self.predicted / self.measured - 1) if self.measured else float("inf")

    def __str__(self) -> str:
        verdict = "named" if self.right else "NOT NAMED"
        return (
            f"{self.case}, seed {self.seed}: {verdict}; predicted {self.predicted:.1%}, measured "
            f"{self.measured:.1%}, off by {self.off:.0%}\n  {self.sentence}"
        )


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--seeds", default="11,12,13", metavar="N,...", help="what is drawn (11,12,13)")
    parser.add_argument("--cases", default=",".join(CASES), metavar="NAME,...", help=", ".join(CASES))
    options = parser.parse_args()
    rows = []
    for seed in map(int, options.seeds.split(",")):
        for name in options.cases.split(","):
            rows.append(row := measure(name, seed))
            print(row, flush=True)
    aims = [
        Aim("cases that are named", sum(row.right for row in rows) / len(rows), 1.0, "", at_least=True),
        *(Aim(f"gain of {r.case}, seed {r.seed}, off by", 100 * r.off, 10.0, "%") for r in rows),
        Aim("unaccounted", 100 * max(row.unaccounted for row in rows), 1.0, "% of a step"),
    ]
    return finish(options, {"cases": [asdict(row) for row in rows]}, aims)


def measure(name: str, seed: int) -> Row:
    """A run that is spoilt in this way, and one that is not."""
    case = CASES[name](random.Random(f"{name} {seed}"), seed)
    steps, undone = case.spoilt.run(), case.undone.run()
    found = explain(steps)
    spoilt_seconds, seconds = (median(step.wall_seconds for step in own) for own in (steps, undone))
    return Row(
        name,
        seed,
        found.sentence,
        case.named(found.finding),
        predicted=found.finding.share,
        measured=1 - seconds / spoilt_seconds,
        unaccounted=max(unaccounted(step) for step in steps),
    )


def unaccounted(step: TimedStep) -> float:
    """See `Row`."""
    recorded = step.recorded
    times = stage_times(recorded.trace, recorded.fixed_order, recorded.grouped)
    return max(abs(own.total / recorded.trace.makespan - 1) for own in times)


if __name__ == "__main__":
    sys.exit(main())
