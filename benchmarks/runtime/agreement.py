"""What it costs that the processes of a stage agree on every task: time exposed, and calls of the store.

    python -m benchmarks.runtime.agreement [--json=FILE] [--check] [--tp=2,4,8] [--task-ms=5,10,30]

Two stages of `tp` processes each on paced devices, tasks of log-normal length (the mean is given; backwards
take twice as long, or as I and W as long each), with and without arrivals that are late on each rank by up to
half a task. Exposed is the time in which inputs are on all ranks, the device is idle and not every rank knows
what to run yet (`benchmarks/runtime/exposure.py`). The stage that has more of it counts. Figures are medians
over six steps, and the least of them, because other work on the machine makes everybody wait.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Aim, finish, found_by_ranks, parse
from benchmarks.runtime.agreement_rank import STAGES

RUN_SECONDS = 1800.0
AIM_TP, AIM_MS = 4, 30.0
LIMITS = {"socket": 0.1, "kv": 0.5}
"""Percent of a step, with BFW and a leader."""


def main() -> int:
    """Measure, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--tp", default="2,4,8", metavar="N,...", help="processes of a stage")
    parser.add_argument("--task-ms", default="5,10,30", metavar="MS,...", help="mean length of a forward")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "tp  task  skew  schedule  carrier  protocol   exposed/task  of the step  at least  ahead  calls/task"
    )
    for tp in map(int, options.tp.split(",")):
        for row in measured(tp, options.task_ms):
            rows.append({"tp": tp, **row})
            print(_line(rows[-1]), flush=True)
    return finish(options, {"cases": rows}, _aims(rows))


def measured(tp: int, lengths: str) -> list[dict[str, Any]]:
    """All cases of a size of groups."""
    module, on_the_cpu = "benchmarks.runtime.agreement_rank", {"JAX_PLATFORMS": "cpu"}
    return found_by_ranks(STAGES * tp, module, lengths, seconds=RUN_SECONDS, env=on_the_cpu)  # type: ignore[no-any-return]


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['tp']:<3} {row['task_ms']:3.0f}   {'yes' if row['skewed'] else 'no ':4}  {row['schedule']:8}  "
        f"{row['carrier']:7}  {row['protocol']:9}  {row['exposed_us_per_task']:9.0f} us  "
        f"{row['exposed_percent']:9.3f} %  {row['quietest_percent']:6.3f} %  {row['lead_ms']:5.1f} ms  "
        f"{row['store_calls_per_task']:6.1f}"
    )


def _aims(rows: Sequence[Mapping[str, Any]]) -> list[Aim]:
    aims = []
    for row in rows:
        aimed = (row["tp"], row["task_ms"], row["schedule"], row["protocol"])
        if aimed == (AIM_TP, AIM_MS, "bfw", "leader"):
            skew = "with skew" if row["skewed"] else "no skew"
            name = f"tp={AIM_TP}, {AIM_MS:g} ms, BFW, {row['carrier']}, {skew}: exposed"
            aims.append(Aim(name, row["exposed_percent"], LIMITS[row["carrier"]], "%"))
    return aims


if __name__ == "__main__":
    sys.exit(main())
