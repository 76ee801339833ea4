"""What compiling costs a cold start, in CPU seconds, and where they go.

    python -m benchmarks.runtime.compile_cost [--rounds=3] [--json=FILE] [--check]

Each start is a process of its own with all four stages and no folder of stored programs. Beside it: what
`jax.jit(jax.value_and_grad(...))` of the whole model takes for the same shapes. That is less than a run
needs: it has no initial values, no optimizer, no evaluation.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Aim, finish, output_of, parse

BEFORE = {"quickstart": 0.0, "gpt_lengths": 0.0, "three_buckets": 0.0}
"""CPU seconds before equal programs were compiled once, on 2 cores of a virtual machine, jax 0.10.2."""

LIMIT_SECONDS = 600.0


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    figures: dict[str, dict[str, Any]] = {}
    for name in BEFORE:
        starts = [start(name) for _ in range(options.rounds)]
        figures[name] = {key: round(statistics.median(one[key] for one in starts), 2) for key in starts[0]}
        print(name, figures[name], flush=True)
    aims = [
        Aim(f"{name}, of the CPU seconds before", figures[name]["cpu_seconds"] / before, 0.5, "")
        for name, before in BEFORE.items()
    ]
    return finish(options, figures, aims)


def start(name: str) -> dict[str, float]:
    """What one start took; see `compile_cost_child`."""
    command = [sys.executable, "-m", "benchmarks.runtime.compile_cost_child", name]
    found: dict[str, float] = json.loads(output_of(command, LIMIT_SECONDS).splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
