"""Documents of natural length in four processes: 1F1B, planned orders, balanced microbatches, and BFW.

    python -m benchmarks.runtime.lengths [--json=FILE] [--check] [--rounds=6] [--costs=FILE]

`configs/gpt_lengths.py`, one stage a process. A few steps give its cost table (medians by bucket). Then all
cases take turns, round by round, on the same documents of the same step: on real compute; then on paced
devices whose tasks last as the table says, times a common factor that makes a mean forward 100 ms, and
simulated with the same durations. Planned orders know the table.

Balanced microbatches hold other numbers of documents, so times are compared per token: each case's over BFW's
in the same round, medians over the rounds. `--costs` takes the table of an earlier `--json`, trains nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Aim, finish, found_by_ranks, parse
from benchmarks.runtime.lengths_rank import CASES

LIMIT_SECONDS = 3000.0
REFERENCE = "bfw"
TIMES = ("real", "paced", "simulated")


def main() -> int:
    """Run, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="turns of each case (6)")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="of an earlier --json; trains nothing")
    options = parser.parse_args()
    arguments = [options.rounds]
    with tempfile.TemporaryDirectory() as folder:
        if options.costs:
            earlier = json.loads(options.costs.read_text(encoding="utf-8"))["figures"]["costs"]
            arguments.append(Path(folder) / "costs.json")
            arguments[-1].write_text(json.dumps(earlier), encoding="utf-8")
        found = found_by_ranks(4, "benchmarks.runtime.lengths_rank", *arguments, seconds=LIMIT_SECONDS)
    cases = [summary(case.name, found["rows"]) for case in CASES]
    print(*map(line, cases), sep="\n")
    paced = [row for row in found["rows"] if "paced" in row]
    off = median(abs(row["paced"] / row["simulated"] - 1) for row in paced)
    aims = [Aim("paced steps off the simulated ones, median", 100 * off, 5.0, "%")]
    return finish(options, {"cases": cases} | found, aims)


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A case: medians of its step times (s), and of its times per token over BFW's in the same round."""
    found: dict[str, Any] = {"case": name}
    for kind in TIMES:
        measured = [row for row in rows if kind in row]
        reference = {row["step"]: row[kind] / row["tokens"] for row in measured if row["case"] == REFERENCE}
        own = [row for row in measured if row["case"] == name]
        if own:
            found[kind] = median(row[kind] for row in own)
            found[f"{kind} over {REFERENCE}"] = median(
                row[kind] / row["tokens"] / reference[row["step"]] for row in own
            )
    planning = [row["planning"] for row in rows if row["case"] == name and row.get("planning") is not None]
    return found | ({"planning": median(planning)} if planning else {})


def line(case: Mapping[str, Any]) -> str:
    """For the eye."""
    known = [kind for kind in TIMES if kind in case]
    times = [f"{kind} {1e3 * case[kind]:7.1f} ms ({case[f'{kind} over {REFERENCE}']:.3f})" for kind in known]
    planning = f", planned in {case['planning']:.2f} s" if "planning" in case else ""
    return f"{case['case']:14} {', '.join(times)}{planning}"


if __name__ == "__main__":
    sys.exit(main())
