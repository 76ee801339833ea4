"""Does the report name what spoils a run, and what undoing it gains?

    python -m benchmarks.runtime.spoilt [--json=FILE] [--check] [--seeds=11,12,13] [--cases=NAME,...]

Six runs of four processes (`spoilt_config.py`) are each spoilt in one known way, and run once more without
that: an uneven split, a slow rank, a slow link, a small limit on microbatches in flight, unequal lengths,
late data. The seed says which stage, rank or link it is, and how bad. The report of the spoilt run must name
it, and what it says would be saved must be what was saved. The first steps of a run are left out.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.harness import Aim, finish, output_of, parse
from rrfp_jax.core.measure.idleness import stage_times
from rrfp_jax.explain.explanation import TimedStep, explain
from rrfp_jax.explain.run_folder import read_run
from rrfp_jax.explain.sentence import Finding, ways_of

STAGES, BLOCKS, MICROBATCHES, UNIT = 4, 20, 12, 32
STEPS, WARM_UP = 16, 4
RUN_SECONDS = 240.0
EVEN = (6, 5, 5, 5)  # the embedding goes with the first blocks

Flags: TypeAlias = Mapping[str, Any]
"""Fields of `spoilt_config.Spoilt`."""


@dataclass(frozen=True)
class Case:
    """A way to spoil a run.

    Attributes:
        spoilt, undone: the fields of both runs.
        named: whether a finding names what is wrong.
    """

    spoilt: Flags
    undone: Flags
    named: Callable[[Finding], bool]


def uneven_split(draw: random.Random) -> Case:
    """One stage has blocks of all others."""
    stage, more = draw.randrange(STAGES), draw.choice((1, 1, 2))
    split = [size + (STAGES - 1) * more if s == stage else size - more for s, size in enumerate(EVEN)]

    def named(found: Finding) -> bool:
        return found.kind == "split" and found.sentence.startswith(f"Stage {stage} has ")

    return Case({"split": _tuple(split)}, {"split": _tuple(EVEN)}, named)


def slow_rank(draw: random.Random) -> Case:
    """The tasks of one rank take longer."""
    rank = draw.randrange(STAGES)
    fields = {"slow_rank": rank, "slowness": draw.uniform(1.4, 2.0)}
    return Case(fields, {}, lambda found: (found.kind, found.subject) == ("stage", rank))


def slow_link(draw: random.Random) -> Case:
    """Messages between two stages take long, there and back."""
    link = draw.randrange(STAGES - 1)
    fields = {"link_delay": draw.uniform(0.03, 0.06), "delayed_link": link}

    def named(found: Finding) -> bool:
        ways = {(link, link + 1), (link + 1, link)}
        return found.kind == "link" and {*ways_of(found.subject)} <= ways

    return Case(fields, {}, named)


def small_limit(draw: random.Random) -> Case:
    """Few microbatches may be in flight."""
    fields = {"max_in_flight": draw.choice((2, 3))}
    return Case(fields, {"max_in_flight": MICROBATCHES}, lambda found: found.kind == "in flight")


def unequal_lengths(draw: random.Random) -> Case:
    """Microbatches of unequal lengths, whose mean is that of equal ones."""
    lengths = [draw.choice((UNIT // 4, UNIT // 2, UNIT, 3 * UNIT)) for _ in range(MICROBATCHES - 1)]
    lengths.append(8 * -(-(sum(lengths) + UNIT) // (8 * MICROBATCHES)) * MICROBATCHES - sum(lengths))
    equal = (sum(lengths) // MICROBATCHES,)
    return Case(
        {"lengths": _tuple(lengths)}, {"lengths": _tuple(equal)}, lambda found: found.kind == "lengths"
    )


def late_data(draw: random.Random) -> Case:
    """Loading a step takes longer than the step."""
    return Case({"load_seconds": draw.uniform(0.08, 0.12)}, {}, lambda found: found.kind == "data")


CASES: Mapping[str, Callable[[random.Random], Case]] = {
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
    case = CASES[name](random.Random(f"{name} {seed}"))
    steps, undone = run(case.spoilt), run(case.undone)
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


def run(fields: Flags) -> Sequence[TimedStep]:
    """The steps of a run after its first ones."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "directory": folder,
            "steps": STEPS,
            "blocks": BLOCKS,
            "microbatches": MICROBATCHES,
            **fields,
        }
        command = [
            *(sys.executable, "-m", "launch.local", "--config=benchmarks/runtime/spoilt_config.py"),
            *(f"--config.{flag}={value}" for flag, value in {**flags, **fields}.items()),
        ]
        output_of(command, RUN_SECONDS)
        return read_run(Path(folder) / "spoilt")[WARM_UP:]


def unaccounted(step: TimedStep) -> float:
    """See `Row`; or what the parts of the whole step miss of it, if that is more."""
    recorded = step.recorded
    span = recorded.trace.makespan
    times = stage_times(recorded.trace, recorded.fixed_order, recorded.grouped)
    parts = step.load_seconds + step.planning_seconds + span
    return max(*(abs(own.total / span - 1) for own in times), parts / step.wall_seconds - 1)


def _tuple(values: Sequence[int]) -> str:
    return json.dumps(list(values)).replace("[", "(").replace("]", ",)" if len(values) == 1 else ")")


if __name__ == "__main__":
    sys.exit(main())
