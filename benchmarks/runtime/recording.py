"""What recording costs: a step with all of it against one with none, on paced and on real devices.

    python -m benchmarks.runtime.recording [--rounds=60] [--json=FILE] [--check]

Recorded are, in every step: the tasks with their times, which all processes send to each other; the flight
recorder; the line of `metrics.jsonl`; the step that `rrfp top` reads, once a second. Four processes, one
stage each, run steps in turns: with all of that, with nothing of it, and with all of it timed.

Two answers for each. `on against off` is the median, over all rounds, of what a step with everything takes
longer than the one without, beside it the standard error. `in the calls` is what the calls themselves take of
the CPU in a step, in the process where that is most, as a share of the step. Where processes wait anyway it
costs less than that; what larger messages cost is not in it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Aim, finish, found_by_ranks, parse

LIMIT_PERCENT = 0.5
LIMIT_SECONDS = 3600.0


def judged(name: str, found: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], list[Aim]]:
    """Figures of the steps of a kind, and their aims.

    A difference that is smaller than the noise shows nothing: it must exceed the limit by two standard errors
    to miss it.
    """
    ratios = 100.0 * (np.asarray(found["on"]) / np.asarray(found["off"]) - 1.0)
    error = 1.2533 * float(np.std(ratios, ddof=1)) / len(ratios) ** 0.5  # of a median
    step = statistics.median(found["on"])
    figures = {
        "step_seconds": step,
        "off_seconds": statistics.median(found["off"]),
        "difference_percent": float(np.median(ratios)),
        "difference_error_percent": error,
        "calls_seconds": max(found["recording_by_rank"]),
        "calls_percent": 100.0 * max(found["recording_by_rank"]) / step,
    }
    least = figures["difference_percent"] - 2.0 * error
    return figures, [
        Aim(f"{name}, on against off, less two standard errors", least, LIMIT_PERCENT, "%"),
        Aim(f"{name}, in the calls", figures["calls_percent"], LIMIT_PERCENT, "%"),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of three steps each")
    options = parser.parse_args(argv)
    measured = found_by_ranks(4, "benchmarks.runtime.recording_rank", options.rounds, seconds=LIMIT_SECONDS)
    figures: dict[str, Any] = {}
    aims: list[Aim] = []
    for name, found in measured.items():
        own, own_aims = judged(name, found)
        figures[name], aims = own, aims + own_aims
        beside = f"standard error {own['difference_error_percent']:.2f}"
        print(
            f"{name}: a step takes {own['step_seconds'] * 1e3:.1f} ms; "
            f"on against off {own['difference_percent']:+.2f} % ({beside}); "
            f"in the calls {own['calls_seconds'] * 1e6:.0f} us, {own['calls_percent']:.3f} %"
        )
    return finish(options, figures, aims)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
