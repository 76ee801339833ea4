"""Paced runs against what their durations say: how far real scheduling and messages are from ideal.

    python -m benchmarks.runtime.fidelity [--json=FILE] [--check] [--quick] [--schedule=NAME ...]

For stages x microbatches x task length x schedule a workload is drawn (log-normal, sd 0.3, half of the
variance common to all tasks of a microbatch) and run on paced devices by as many processes. Beside it stands
the step time simulated with the same durations and the measured hop: the time between the end of a task and
the moment the next stage knows, median over the run's own transfers.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

from benchmarks.harness import Aim, finish, parse, percent_longer
from benchmarks.runtime.paced import PacedCase
from rrfp_jax.trace.costs import log_normal

SCHEDULES = ("1f1b", "gpipe", "bf", "bfw", "zb-h1")
LIMIT = 8


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each schedule")
    parser.add_argument(
        "--schedule", action="append", choices=SCHEDULES, metavar="NAME", help="again for each; all if none"
    )
    options = parser.parse_args()
    cases = itertools.product((4, 8), (16, 32), (0.01, 0.03), options.schedule or SCHEDULES)
    rows = []
    for stages, microbatches, seconds, schedule in cases:
        if options.quick and (stages, microbatches, seconds) != (4, 16, 0.01):
            continue
        rows.append(row := measure(stages, microbatches, seconds, schedule))
        print(
            f"{stages} stages, {microbatches} microbatches, {seconds * 1e3:.0f} ms, {schedule:5}: real "
            f"{row['real']:.4f} s, simulated {row['simulated']:.4f} s, off by {row['percent']:+.2f} %, "
            f"hop {row['hop_us']:.0f} us",
            flush=True,
        )
    off = np.abs([row["percent"] for row in rows])
    aims = [
        Aim("median difference", float(np.median(off)), 3.0, "%"),
        Aim("worst difference", float(np.max(off)), 5.0, "%"),
    ]
    return finish(options, {"cases": rows}, aims)


def measure(stages: int, microbatches: int, seconds: float, schedule: str) -> dict[str, Any]:
    """One case: the median real step, the simulated one, and their difference."""
    workload = log_normal(stages, microbatches, forward=seconds, sigma=0.3, shared=0.5, seed=1)
    case = PacedCase(workload=workload, schedule=schedule, limit=LIMIT)
    steps, hop, _ = case.run()
    real, simulated = float(np.median(steps)), case.simulated(hop)
    return {
        **{"stages": stages, "microbatches": microbatches, "seconds": seconds, "schedule": schedule},
        **{
            "real": real,
            "simulated": simulated,
            "percent": percent_longer(real, simulated),
            "hop_us": hop * 1e6,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
