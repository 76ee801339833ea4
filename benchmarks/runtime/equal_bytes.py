"""Readiness-first at the bytes of 1F1B on paced devices: real processes, messages and scheduling.

    python -m benchmarks.runtime.equal_bytes [--json=FILE] [--check] [--quick] [--seeds=1] [--write]

8 stages, 32 microbatches, forwards of 30 ms (log-normal, sd 0.3, half of the variance common to all tasks of
a microbatch), halves of that where a stage has two chunks. Strict ZB-V, readiness-first by ZB-V's order, BFW
and 1F1B, in turns. No stage may hold more than 1F1B does, 8 microbatches: hints by their limit, and the fixed
orders never do; what they held is told from what ran. Beside each stands the step time simulated with the
same durations and the run's own hop (`benchmarks.runtime.fidelity`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.harness import SIMULATED, Aim, Compared, finish, parse, put_figures, table
from benchmarks.runtime.paced import PacedCase
from rrfp_jax.trace.costs import log_normal
from rrfp_jax.trace.records import peak_bytes

SCHEDULES = ("zb-v", "ranked:zb-v", "bfw", "1f1b")
REFERENCE = SCHEDULES[0]
STAGES, MICROBATCHES, SECONDS = 8, 32, 0.030
QUICK = (2, 4, 0.010)


@dataclass(frozen=True, kw_only=True)
class Row(Compared):
    """One schedule on one step.

    Attributes:
        real, simulated: of the step (s), the former the median of the run's steps.
        hop: the run's own (s).
        held: most microbatches that a stage held, a chunk counting as its part of one.
    """

    schedule: str
    seed: int
    hop: float
    held: float

    def __str__(self) -> str:
        return (
            f"{self.schedule:12} real {self.real:.4f} s, simulated {self.simulated:.4f} s, "
            f"off by {self.percent:+.2f} %, hop {1e6 * self.hop:.0f} us, held {self.held:g}"
        )


def measure(schedule: str, seed: int, stages: int, microbatches: int, seconds: float) -> Row:
    """Run and simulate one schedule."""
    workload = log_normal(stages, microbatches, forward=seconds, sigma=0.3, shared=0.5, seed=seed)
    case = PacedCase(workload=workload, schedule=schedule, limit=stages)
    run = case.run()
    held = max(max(peak_bytes(step, ((1.0,) * microbatches,) * stages)) for step in run.traced)
    return Row(
        schedule=schedule,
        seed=seed,
        real=median(run.steps),
        simulated=case.simulated(run.hop),
        hop=run.hop,
        held=held,
    )


def markdown(rows: Sequence[Row]) -> str:
    """A table of medians over the seeds."""
    cells, base = [], median(row.real for row in rows if row.schedule == REFERENCE)
    for name in SCHEDULES:
        own = [row for row in rows if row.schedule == name]
        real, simulated = median(row.real for row in own), median(row.simulated for row in own)
        held = max(row.held for row in own)
        cells.append((name, f"{real:.3f}", f"{simulated:.3f}", f"{real / base:.3f}", f"{held:g}"))
    return table(["schedule", "real, s", "simulated, s", "over strict ZB-V's", "held"], cells)


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="2 stages, 4 microbatches, 10 ms")
    parser.add_argument("--write", action="store_true", help="the table into results/simulated.md")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="steps (1)")
    options = parser.parse_args()
    size = QUICK if options.quick else (STAGES, MICROBATCHES, SECONDS)
    rows = []
    for seed in range(1, options.seeds + 1):
        for schedule in SCHEDULES:
            rows.append(row := measure(schedule, seed, *size))
            print(row, flush=True)
    if options.write:
        put_figures(SIMULATED, "equal bytes, paced", f"\n{markdown(rows)}\n\n")
    aims = [
        Aim("largest difference of real and simulated", max(abs(row.percent) for row in rows), 2.0, "%"),
        Aim("microbatches held, most", max(row.held for row in rows), size[0], ""),
    ]
    return finish(options, {"cases": [asdict(row) for row in rows]}, aims)


if __name__ == "__main__":
    sys.exit(main())
