"""Training by NIXL, by sockets and by mail, 4 processes: is it equal to the bit?

    python -m tests.verification.transports [--json=FILE] [--check] [--steps=30] [CASE ...]

The cases are those of `tests/support/transports_ranks.py`: BF, BFW, a hint that reserves, two chunks, 2 x 2 x
2 devices, stages of different width, tied parameters. Of each, losses and norms of every step, an evaluation,
and all parameters at the end are compared, on every rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Aim, finish, parse

REPOSITORY = Path(__file__).parents[2]
RANKS = 4
COMPARED = "steps", "evaluated", "params"
LIMIT_SECONDS = 1200.0


def trained(folder: Path, steps: int, cases: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What each rank found, by case and transport."""
    own = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    own["RRFP_TEST_EXECUTABLES"] = str(REPOSITORY / ".pytest_cache" / "executables")
    launch = [
        sys.executable,
        "-m",
        "rrfp_jax",
        "launch",
        "-n",
        str(RANKS),
        "-m",
        "tests.support.transports_ranks",
    ]
    done = subprocess.run(
        [*launch, str(folder), str(steps), *cases],
        cwd=folder,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:])
    return [json.loads((folder / f"transports-{rank}.json").read_text()) for rank in range(RANKS)]


def differences(found: Sequence[Mapping[str, Any]], case: str) -> list[str]:
    """What is not equal, by rank."""
    return [
        f"rank {rank}: {what} by {way}"
        for rank, cases in enumerate(found)
        for what in COMPARED
        for way, own in cases[case].items()
        if cases[case]["socket"][what] != own[what]
    ]


def main() -> int:
    """Train, compare, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of each training (default: 30)")
    parser.add_argument("cases", nargs="*", help="some of the cases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = trained(Path(folder), options.steps, options.cases)
    wrong = {case: differences(found, case) for case in found[0] if case != "channels"}
    for case, different in wrong.items():
        print(f"{case:10} {'; '.join(different) or 'equal to the bit'}", flush=True)
    aims = [Aim("cases that differ", sum(map(bool, wrong.values())), 0, "cases")]
    return finish(options, {"steps": options.steps, "cases": wrong}, aims)


if __name__ == "__main__":
    sys.exit(main())
