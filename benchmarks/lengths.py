"""Documents of natural length in four processes: 1F1B, planned orders, balanced microbatches, and BFW.

    python -m benchmarks.lengths [--json=FILE] [--check] [--rounds=6]

`configs/gpt_lengths.py`, one stage a process. A few steps give its cost table (medians by bucket). Then all
cases take turns, round by round, on the same documents of the same step, each thrice: on real compute, on
paced devices whose tasks last as the table says, and simulated with it. Planned orders know the table.

Balanced microbatches hold other numbers of documents, so times are compared per token: each case's over BFW's
in the same round, medians over the rounds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Aim, finish, output_of, parse
from benchmarks.lengths_rank import CASES

LIMIT_SECONDS = 3000.0
REFERENCE = "bfw"
TIMES = ("real", "paced", "simulated")


def main() -> int:
    """Run, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="turns of each case (6)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "rrfp_jax.train.launch", "-n", "4", f"--directory={folder}"]
        output_of([*command, "-m", "benchmarks.lengths_rank", str(file), str(options.rounds)], LIMIT_SECONDS)
        found = json.loads(file.read_text(encoding="utf-8"))
    cases = [summary(case.name, found["rows"]) for case in CASES]
    print(*map(line, cases), sep="\n")
    off = median(abs(row["paced"] / row["simulated"] - 1) for row in found["rows"])
    aims = [
        Aim("paced steps off the simulated ones, median", 100 * off, 5.0, "%"),
        Aim("rounds", min(case["rounds"] for case in cases), options.rounds, "", at_least=True),
    ]
    return finish(options, {"cases": cases} | found, aims)


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A case: medians of its step times (s), and of its times per token over BFW's in the same round."""
    own = [row for row in rows if row["case"] == name]
    reference = {row["step"]: row for row in rows if row["case"] == REFERENCE}
    found: dict[str, Any] = {"case": name, "rounds": len(own)}
    for kind in TIMES:
        found[kind] = median(row[kind] for row in own)
        found[f"{kind} over {REFERENCE}"] = median(
            row[kind] / row["tokens"] / (other[kind] / other["tokens"])
            for row in own
            for other in [reference[row["step"]]]
        )
    planning = [row["planning"] for row in own if row["planning"] is not None]
    found["planning"] = median(planning) if planning else None
    found["tokens"] = median(row["tokens"] for row in own)
    return found


def line(case: Mapping[str, Any]) -> str:
    """For the eye."""
    times = [f"{kind} {1e3 * case[kind]:6.1f} ms ({case[f'{kind} over {REFERENCE}']:.3f})" for kind in TIMES]
    planning = "" if case["planning"] is None else f", planned in {case['planning']:.2f} s"
    return f"{case['case']:14} {', '.join(times)}{planning}"


if __name__ == "__main__":
    sys.exit(main())
