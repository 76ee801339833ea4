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

BEFORE = {"quickstart": 12.6, "gpt_lengths": 4.9, "three_buckets": 5.9}
"""Times what plain JAX took, before equal programs were compiled once; jax 0.10.2 on 2 cores.

CPU seconds of the same work differ by a third with what else runs on the machine, and these much less.
"""

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
    aims = []
    for name, before in BEFORE.items():
        now = figures[name]["cpu_seconds"] / figures[name]["plain_cpu_seconds"]
        aims.append(Aim(f"{name}: of what it was, beside plain JAX", now / before, 0.5, "times"))
    return finish(options, figures, aims)


def start(name: str) -> dict[str, float]:
    """What one start took; see `compile_cost_child`."""
    command = [sys.executable, "-m", "benchmarks.runtime.compile_cost_child", name]
    found: dict[str, float] = json.loads(output_of(command, LIMIT_SECONDS).splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
