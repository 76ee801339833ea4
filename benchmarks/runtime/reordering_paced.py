"""Gradients in microbatch order against arrival order, on paced devices, where messages overtake one another.

    python -m benchmarks.runtime.reordering_paced [--json=FILE] [--check] [--quick] [--seeds=3]

Some steps of `benchmarks.studies.reordering`, run in real processes with real messages: `arrival`, then
`index` with so many spare buffers, in turns. Figures are step times (medians of a run's steps) over those of
`arrival` on the same step, medians over the seeds. Beside them stands the same, simulated with the runs' own
hops. Other work on the machine can be seen in single runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from statistics import median

from benchmarks.harness import Aim, Compared, finish, parse
from benchmarks.runtime.paced import PacedCase
from benchmarks.studies.reordering import Cell

SPARES = (0, 1, 2, 4)
CASES = (
    (Cell("exponential", 1.0, 8, 32), "bf", 16),
    (Cell("heavy", 0.5, 8, 32), "bfw", 16),
    (Cell("heavy", 1.0, 4, 32), "bf", 8),
    (Cell("heavy", 1.0, 4, 32), "bfw", 8),
)


@dataclass(frozen=True, kw_only=True)
class Ratio(Compared):
    """Step time of `index` with so many spare buffers over that of `arrival`: on one step, or medians."""

    cell: Cell
    schedule: str
    limit: int
    spare: int

    def __str__(self) -> str:
        rules = f"{self.schedule:3}, limit {self.limit}, {self.spare} spare"
        return f"{self.cell}, {rules}: real {self.real:.3f}, simulated {self.simulated:.3f}"


def measure(cell: Cell, schedule: str, limit: int, seed: int) -> list[Ratio]:
    """All ratios of one step."""
    workload = cell.workload(seed)

    def times(case: PacedCase) -> tuple[float, float]:
        """A step's seconds, real and simulated."""
        steps, hop, _ = case.run()
        return median(steps), case.simulated(hop)

    case = partial(PacedCase, workload=workload, schedule=schedule, limit=limit)
    real, simulated = times(case(accumulation="arrival"))
    found = []
    for spare in SPARES:
        ours, theirs = times(case(spare_gradients=spare))
        over = {"real": ours / real, "simulated": theirs / simulated}
        found.append(Ratio(cell=cell, schedule=schedule, limit=limit, spare=spare, **over))
    return found


def medians(steps: Sequence[Sequence[Ratio]]) -> list[Ratio]:
    """Of the ratios that `measure` gave for several steps of one kind."""
    return [
        replace(one[0], real=median(r.real for r in one), simulated=median(r.simulated for r in one))
        for one in zip(*steps, strict=True)
    ]


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="one step")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="steps of each kind (3)")
    options = parser.parse_args()
    seeds = range(1 if options.quick else options.seeds)
    steps: list[Ratio] = []
    ratios: list[Ratio] = []
    for case in CASES[-1:] if options.quick else CASES:
        found = [measure(*case, seed) for seed in seeds]
        steps += chain(*found)
        ratios += (own := medians(found))
        print(*own, sep="\n", flush=True)
    off = max(abs(ratio.percent) for ratio in ratios)
    aims = [Aim("largest difference of the median ratios, real and simulated", off, 3.0, "%")]
    return finish(options, {"medians": [*map(asdict, ratios)], "steps": [*map(asdict, steps)]}, aims)


if __name__ == "__main__":
    sys.exit(main())
