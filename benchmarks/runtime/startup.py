"""How long the quickstart takes from its launch to the end of its first step, cold and warm.

    python -m benchmarks.runtime.startup [--rounds=3] [--json=FILE] [--check]

Each round launches it twice in a folder of its own, in four processes: cold, when every program is compiled,
and warm, when all are loaded. It is ended by Ctrl-C after the first step.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, Aim, finish, parse

READY = re.compile(r"ready after ([\d.]+) s: (\d+) programs compiled, (\d+) loaded")
LIMIT_SECONDS = 600.0


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind, starts in found.items():
                starts.append(start(Path(folder)))
                print(kind, starts[-1], flush=True)
    figures: dict[str, Any] = {"starts": found}
    for kind, starts in found.items():
        figures[kind] = {name: statistics.median(one[name] for one in starts) for name in starts[0]}
        print(f"{kind}: {figures[kind]}")
    compiled = max(one["compiled"] for one in found["warm"])
    return finish(options, figures, [Aim("programs compiled by a warm start", compiled, 0, "programs")])


def start(folder: Path) -> dict[str, float]:
    """Seconds to the end of the start and of the first step, and how many programs all ranks compiled.

    Raises:
        RuntimeError: the run ended before its first step.
    """
    command = [*(sys.executable, "-m", "rrfp_jax", "launch", f"--config={REPOSITORY}/configs/quickstart.py")]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    began, said, found = time.monotonic(), [], {}
    with subprocess.Popen(
        [*command, f"--config.directory={folder}"], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            said.append(line)
            if ready := READY.search(line):
                found = {"ready_seconds": float(ready[1]), "compiled": int(ready[2]), "loaded": int(ready[3])}
            if "step     0" in line:
                found["first_step_seconds"] = round(time.monotonic() - began, 1)
                run.send_signal(signal.SIGINT)
                break
        run.stdout.read()
        run.wait(LIMIT_SECONDS)
    if "first_step_seconds" not in found:
        raise RuntimeError(f"no first step:\n{''.join(said)}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
