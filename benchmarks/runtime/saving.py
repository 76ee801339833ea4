"""What a checkpoint costs the run that writes it: nothing, waiting for it, or going on beside the writing.

    python -m benchmarks.runtime.saving [--rounds=5] [--json=FILE] [--check]

Four processes, one stage each, train a transformer with about 200 MB of parameters and AdamW's state. Blocks
of eight steps take turns: without a save; with one that is waited for before the first step; with one that
is written beside the steps and must be complete at the end of the block; and with one into the host's memory
after each step, as `--replace-after` has it. What a block takes longer than one without is what saving costs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from benchmarks.harness import Aim, finish, found_by_ranks, parse
from benchmarks.runtime.saving_rank import MODES, STEPS

LIMIT_SECONDS = 3600.0


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each kind")
    options = parser.parse_args(argv)
    figures = found_by_ranks(4, "benchmarks.runtime.saving_rank", options.rounds, seconds=LIMIT_SECONDS)
    seconds = {mode: statistics.median(figures["seconds"][mode]) for mode in MODES}
    step = seconds["none"] / STEPS
    lost = {mode: seconds[mode] - seconds["none"] for mode in ("waiting", "beside", "memory")}
    lost["memory"] /= STEPS
    figures |= {"step_seconds": step, "lost_seconds": lost}
    print(f"checkpoint of {figures['bytes'] / 1e6:.0f} MB; a step takes {step:.3f} s")
    for mode, value in lost.items():
        print(f"each save, {mode:>7}: {value:6.3f} s lost, {value / step:5.2f} of a step")
    share = lost["beside"] / lost["waiting"] if lost["waiting"] > 0 else 0.0
    return finish(options, figures, [Aim("lost beside the steps, of what waiting loses", share, 0.5, "")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
