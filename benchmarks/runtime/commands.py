"""How long commands take to tell their help, to refuse what is mistyped, and to do what is cheap.

    python -m benchmarks.runtime.commands [--rounds=5] [--json=FILE] [--check]

Each is a process of its own. Medians of its processor time, which other load disturbs least; on a quiet
machine it takes as long. What needs a config's fields reads the config, which imports JAX.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.harness import REPOSITORY, Aim, finish, parse

CONFIG = "configs/quickstart.py"
COMMANDS = ("train", "launch", "sim", "plan", "report", "top", "doctor")

AT_ONCE = [(command, ["--help"]) for command in COMMANDS] + [
    *((command, ["--nonsense"]) for command in COMMANDS),
    *((command, [CONFIG]) for command in COMMANDS),
    ("sim", ["--family=log-normal", "--stages=4", "--microbatches=8"]),
]
WITH_JAX = [*((command, [f"--config={CONFIG}", "--help"]) for command in ("train", "launch")), ("doctor", [])]

AIM_SECONDS = 0.4
"""Of all that needs no JAX."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    found: dict[str, float] = {}
    for command, arguments in [*AT_ONCE, *WITH_JAX]:
        name = " ".join([f"rrfp-{command}", *arguments])
        found[name] = statistics.median(seconds(command, arguments) for _ in range(options.rounds))
        print(f"{found[name]:6.2f} s  {name}", flush=True)
    slowest = max(list(found.values())[: len(AT_ONCE)])
    return finish(options, {"seconds": found}, [Aim("the slowest without JAX", slowest, AIM_SECONDS, "s")])


def seconds(command: str, arguments: Sequence[str]) -> float:
    """What a command takes of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = [sys.executable, "-m", f"rrfp_jax.commands.{command}", *arguments]
    subprocess.run(whole, cwd=REPOSITORY, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
