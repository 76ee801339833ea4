"""What one decision of the core costs, by schedule, and beside it what it cost at another revision.

    python -m benchmarks.studies.decisions [--json=FILE] [--check] [--before=REVISION]

8 stages, 32 microbatches, two chunks a stage in a V, at most 8 microbatches in flight. A step is simulated,
and the events that each stage's scheduler was told are told again to a new one: CPU time of the core alone,
arrivals included, over the number of tasks. Several processes take turns; the least of each counts. Fixed
orders are followed, so that theirs is the cost of what all schedules need.

`--before` measures BFW with the core of an earlier revision in the same run, from a worktree of its own. Then
the aim is over that; else over BFW as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import REPOSITORY, Aim, finish, output_of, parse

SCHEDULES = ("zb-v", "bf", "bfw", "ranked:zb-v", "ranked:v-zb", "ranked:v-half", "ranked:v-min")
RANKED_FOR_THE_LIMIT = ("ranked:zb-v", "ranked:v-zb")
"""By orders that are made for the bytes of 1F1B, which the limit stands for."""

ROUNDS, SECONDS = 4, 120.0
CHILD = Path(__file__).with_name("decisions_child.py")


def measure(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Microseconds a task by schedule, with the core that is in a folder."""
    command = [sys.executable, str(CHILD), *names]
    found: dict[str, float] = json.loads(output_of(command, SECONDS, {"PYTHONPATH": str(folder)}))
    return found


def main() -> int:
    """Measure in turns, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--before", metavar="REVISION", help="measure BFW of this revision, too")
    options = parser.parse_args()
    now: list[dict[str, float]] = []
    before: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        earlier = Path(name) / "earlier"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        if options.before:
            subprocess.run([*git, "add", "--detach", str(earlier), options.before], check=True, timeout=60)
        try:
            for _ in range(ROUNDS):
                now.append(measure(REPOSITORY, SCHEDULES))
                if options.before:
                    before.append(measure(earlier, ["bfw"])["bfw"])
        finally:
            if options.before:
                subprocess.run([*git, "remove", "--force", str(earlier)], check=True, timeout=60)
    cost = {name: min(one[name] for one in now) for name in SCHEDULES}
    base = min(before) if before else cost["bfw"]
    if before:
        print(f"{'bfw at ' + options.before:22} {base:5.2f} us a task")
    for name, own in cost.items():
        print(f"{name:22} {own:5.2f} us a task, {own / base:.2f} x")
    worst = max(cost[name] for name in ("bfw", *RANKED_FOR_THE_LIMIT))
    figures = {"us_a_task": cost, "before": {"bfw": base} if before else None}
    return finish(options, figures, [Aim("a decision over BFW's before", worst / base, 1.3, "x")])


if __name__ == "__main__":
    sys.exit(main())
