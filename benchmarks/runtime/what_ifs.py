"""What-ifs against what they are about: a run's own steps replayed with one thing changed, and a run with it.

    python -m benchmarks.runtime.what_ifs [--json=FILE] [--check] [--seeds=21,22]

Paced runs of four processes (`blocks.py`): real scheduling, messages and clocks. For each change the step
time that the report predicts from the one run stands beside that of the other run. More bytes are not among
them, since paced stages hold none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median

from benchmarks.harness import Aim, finish, parse
from benchmarks.runtime.blocks import EVEN, MICROBATCHES, Paced
from rrfp_jax.sim.splits import Layers
from rrfp_jax.sim.what_if import what_ifs

LENGTHS = (0.4, 0.6, 2.2, 0.8, 1.0, 0.4, 1.4, 1.2, 0.6, 2.0, 0.4, 0.8, 1.6, 0.6, 1.2, 0.8)
"""Of the microbatches, beside their mean."""


@dataclass(frozen=True)
class Pair:
    """A run, how the report calls a change of it, and the run with that change."""

    run: Paced
    change: str
    changed: Paced


def pairs(seed: int) -> Iterator[Pair]:
    """All that is tried."""
    even = Paced(seed=seed)
    lengths = tuple(length * MICROBATCHES / sum(LENGTHS) for length in LENGTHS)
    yield Pair(replace(even, slowness=(1.0, 1.5, 1.0, 1.0)), "stage 1 as fast as the others", even)
    yield Pair(replace(even, slowness=(1.3, 1.0, 1.6, 1.0)), "all stages equally fast", even)
    uneven, better = replace(even, split=(7, 5, 5, 3)), replace(even, split=(6, 6, 5, 3))
    yield Pair(uneven, "split 5,5,5,5 instead of 7,5,5,3", replace(even, split=EVEN))
    yield Pair(uneven, "layer 6 (Block) on stage 1 instead of 0", better)
    jitter = replace(even, jitter=0.3)
    yield Pair(jitter, "no jitter: tasks of equal lengths take equal times", replace(even, jitter=-0.3))
    yield Pair(replace(even, lengths=lengths), "microbatches of equal lengths", even)
    slow = replace(even, link=1, link_seconds=0.06)
    yield Pair(slow, "the links between stages 1 and 2 as fast as the others", even)
    late = replace(even, hop=0.03)
    yield Pair(late, "all links twice as fast", replace(even, hop=0.015))
    yield Pair(late, "one microbatch more in flight", replace(late, limit=late.limit + 1))
    few = replace(late, limit=4)
    yield Pair(few, "one microbatch more in flight", replace(late, limit=5))
    yield Pair(few, "no limit on microbatches in flight", replace(late, limit=MICROBATCHES))
    for name in ("bfw", "1f1b"):
        yield Pair(jitter, f"schedule {name}", replace(jitter, schedule=name))
    fixed = replace(jitter, schedule="1f1b")
    yield Pair(fixed, "schedule zb-h1", replace(jitter, schedule="zb-h1"))
    equal = "schedule bf with as many microbatches in flight, 4"
    yield Pair(fixed, equal, replace(jitter, limit=4))


@dataclass(frozen=True)
class Row:
    """One change: seconds of a step before it, predicted, and measured; medians of the steps."""

    change: str
    seed: int
    before: float
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """How far the prediction is off (%)."""
        return 100 * abs(self.predicted / self.measured - 1)

    def __str__(self) -> str:
        return (
            f"{self.change}: {self.before * 1e3:.1f} ms, predicted {self.predicted * 1e3:.1f}, measured "
            f"{self.measured * 1e3:.1f}, off by {self.off:.1f} %"
        )


def main() -> int:
    """Run all pairs, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--seeds", default="21,22", metavar="N,...", help="what is drawn (21,22)")
    options = parser.parse_args()
    rows = []
    for seed in map(int, options.seeds.split(",")):
        for pair in pairs(seed):
            rows.append(row := measure(pair, seed))
            print(row, flush=True)
    off = [row.off for row in rows]
    aims = [Aim("what-ifs, off by, median", median(off), 3.0, "%")]
    print(f"worst: {max(rows, key=lambda row: row.off)}")
    return finish(options, {"changes": [asdict(row) | {"off": row.off} for row in rows]}, aims)


def measure(pair: Pair, seed: int) -> Row:
    """One change."""
    steps = [step.recorded for step in pair.run.run()]
    layers = Layers.of(steps)
    predicted = [
        change.seconds
        for step in steps
        for change in what_ifs(step, layers=layers).changes
        if change.change == pair.change
    ]
    if len(predicted) < len(steps) / 2:
        raise RuntimeError(f"{pair.change!r} is not among the changes of most steps")
    before, measured = ([s.recorded.trace.makespan for s in run.run()] for run in (pair.run, pair.changed))
    return Row(pair.change, seed, median(before), median(predicted), median(measured))


if __name__ == "__main__":
    sys.exit(main())
