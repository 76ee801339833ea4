"""What a checkpoint costs the run that writes it: nothing, waiting for it, or going on beside the writing.

    python -m benchmarks.runtime.saving [--rounds=5] [--json=FILE] [--check]

Four processes, one stage each, train a transformer with about 200 MB of parameters and AdamW's state. Blocks
of eight steps take turns: without a save, with one that is waited for before the first step, and with one
that is written beside the steps and must be complete at the end of the block. What a block takes longer than
one without is what the save costs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Aim, finish, parse
from benchmarks.runtime.saving_rank import MODES, STEPS


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each kind")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [*(sys.executable, "-m", "rrfp_jax.commands.launch", "-n", "4", "--directory", folder)]
        command += ["-m", "benchmarks.runtime.saving_rank", str(file), str(options.rounds)]
        subprocess.run(command, check=True, timeout=3600, stdout=subprocess.DEVNULL)
        figures = json.loads(file.read_text(encoding="utf-8"))
    seconds = {mode: statistics.median(figures["seconds"][mode]) for mode in MODES}
    step = seconds["none"] / STEPS
    lost = {mode: seconds[mode] - seconds["none"] for mode in ("waiting", "beside")}
    figures |= {"step_seconds": step, "lost_seconds": lost}
    print(f"checkpoint of {figures['bytes'] / 1e6:.0f} MB; a step takes {step:.3f} s")
    for mode, value in lost.items():
        print(f"a save, {mode:>7}: {value:6.3f} s lost, {value / step:5.2f} of a step")
    share = lost["beside"] / lost["waiting"] if lost["waiting"] > 0 else 0.0
    return finish(options, figures, [Aim("lost beside the steps, of what waiting loses", share, 0.5, "")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
