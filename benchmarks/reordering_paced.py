"""Gradients in microbatch order against arrival order, on paced devices, where messages overtake one another.

    python -m benchmarks.reordering_paced [--json=FILE] [--check] [--quick] [--seeds=3]

A handful of the steps of `benchmarks.reordering`, run in real processes with real messages: `arrival`, then
`index` with so many spare buffers, in turns. Figures are ratios of step times (medians of a run's steps) to
those of `arrival` on the same step; beside them stands the same ratio simulated with the runs' own hops.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median

from benchmarks.harness import Aim, finish, parse
from benchmarks.paced import PacedCase
from benchmarks.reordering import Cell

SPARES = (0, 1, 2, 4)
CASES = (
    (Cell("exponential", 1.0, 8, 32), "bf", 16),
    (Cell("heavy", 0.5, 8, 32), "bfw", 16),
    (Cell("heavy", 1.0, 4, 32), "bf", 8),
    (Cell("heavy", 1.0, 4, 32), "bfw", 8),
)


@dataclass(frozen=True)
class Ratio:
    """`index` with so many spare buffers over `arrival` on one step."""

    cell: Cell
    schedule: str
    limit: int
    seed: int
    spare: int
    real: float
    simulated: float

    @property
    def percent(self) -> float:
        """By how much the real ratio differs from the simulated one."""
        return 100 * (self.real / self.simulated - 1)

    def __str__(self) -> str:
        rules = f"{self.schedule}, limit {self.limit}, {self.spare} spare"
        return f"{self.cell}, {rules}, seed {self.seed}: {self.real:.3f}, simulated {self.simulated:.3f}"


def measure(cell: Cell, schedule: str, limit: int, seed: int) -> list[Ratio]:
    """All ratios of one step."""
    workload = cell.workload(seed)

    def times(case: PacedCase) -> tuple[float, float]:
        """A step's seconds, real and simulated."""
        steps, hop = case.run()
        return median(steps), case.simulated(hop)

    case = partial(PacedCase, workload=workload, schedule=schedule, limit=limit)
    real, simulated = times(case(accumulation="arrival"))
    found = []
    for spare in SPARES:
        ours, theirs = times(case(spare_gradients=spare))
        found.append(Ratio(cell, schedule, limit, seed, spare, ours / real, theirs / simulated))
    return found


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="one step")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="steps of each kind (3)")
    options = parser.parse_args()
    cases = [(*CASES[-1], 0)] if options.quick else [(*c, s) for s, c in product(range(options.seeds), CASES)]
    ratios: list[Ratio] = []
    for case in cases:
        ratios += (found := measure(*case))
        for ratio in found:
            print(ratio, flush=True)
    off = [abs(ratio.percent) for ratio in ratios]
    aims = [
        Aim("median difference of real and simulated ratios", median(off), 3.0, "%"),
        Aim("worst difference", max(off), 5.0, "%"),
    ]
    return finish(options, {"ratios": [asdict(ratio) for ratio in ratios]}, aims)


if __name__ == "__main__":
    sys.exit(main())
