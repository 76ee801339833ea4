"""How fast the core and the simulator are."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.harness import REPOSITORY, Aim, Found, bench, output_of, say
from benchmarks.steps import simulated
from rrfp_jax.trace.costs import log_normal

RUNS = {10**4: 10, 10**5: 3, 10**6: 2}
"""How often a step of so many tasks is simulated."""

HINTS = ("zb-v", "bf", "bfw", "ranked:zb-v", "ranked:v-zb", "ranked:v-half", "ranked:v-min")
RANKED_FOR_THE_LIMIT = ("ranked:zb-v", "ranked:v-zb")
"""By orders that are made for the bytes of 1F1B, which the limit stands for."""

ROUNDS, SECONDS = 4, 120.0


@bench(
    "How fast is the simulator, and does its cost per task grow with the step?",
    minutes="7 *",
    aims="10 us a task of BF, 30 % more from 10^4 to 10^6 tasks",
)
def sim_speed(tasks: tuple[int, ...] = tuple(RUNS)) -> Found:
    """Steps on 8 stages, log-normal durations, at most 32 microbatches in flight: from the workload to the
    recorded trace, seconds of one core, the fastest of several runs."""
    rows: list[dict[str, Any]] = []
    for schedule in ("bf", "1f1b", "bfw"):
        for count in tasks:
            per_microbatch = 8 * (3 if schedule == "bfw" else 2)
            workload = log_normal(
                *(8, count // per_microbatch),
                **{"forward": 0.01, "sigma": 0.3, "shared": 0.5, "seed": 0, "transfer": 0.001},  # type: ignore[arg-type]
            )
            costs = []
            for _ in range(RUNS.get(count, 3)):
                gc.collect()  # what the run before has left is not this one's
                began = process_time()
                trace = simulated(schedule, workload, limit=32)
                took = process_time() - began
                records = len(trace.records)
                costs.append(1e6 * took / records)
            rows.append({"schedule": schedule, "tasks": records, "us_per_task": min(costs)})
            say(f"{schedule:5} {records:8d} tasks: {min(costs):5.2f} us a task")
    bf = [row["us_per_task"] for row in rows if row["schedule"] == "bf"]
    aims = [Aim("a task of BF", max(bf), 10.0, "us")]
    if len(bf) > 1:
        growth = 100 * (bf[-1] / bf[0] - 1)
        aims.append(Aim("growth of that from the fewest tasks to the most", growth, 30.0, "%"))
    return Found({"cases": rows}, aims)


@bench(
    "What does one decision of the core cost, by schedule, and what did it cost before?",
    minutes="1",
    aims="1.3 times BFW's before",
)
def decisions(before: str = "") -> Found:
    """8 stages, 32 microbatches, two chunks a stage in a V, at most 8 in flight. The events of a simulated
    step are told to new schedulers: CPU time of the core over the number of tasks, the least of several
    processes. `--before=REVISION` measures BFW with the core of another revision beside it, from a worktree;
    then the aim is over that, else over BFW as it is."""
    now, earlier = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "earlier"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        if before:
            subprocess.run([*git, "add", "--detach", str(folder), before], check=True, timeout=60)
        try:
            for _ in range(ROUNDS):
                now.append(_measured(REPOSITORY, *HINTS))
                if before:
                    earlier.append(_measured(folder, "bfw")["bfw"])
        finally:
            if before:
                subprocess.run([*git, "remove", "--force", str(folder)], check=True, timeout=60)
    cost = {name: min(one[name] for one in now) for name in HINTS}
    base = min(earlier, default=cost["bfw"])
    for name, own in {f"bfw at {before or 'this revision'}": base, **cost}.items():
        say(f"{name:22} {own:5.2f} us a task, {own / base:.2f} x")
    worst = max(cost[name] for name in ("bfw", *RANKED_FOR_THE_LIMIT))
    figures = {"us_a_task": cost, "before": {"bfw": base} if before else None}
    return Found(figures, [Aim("a decision over BFW's before", worst / base, 1.3, "x")])


def _measured(folder: Path, *names: str) -> dict[str, float]:
    """Microseconds a task by schedule, with the core that is in a folder."""
    child = Path(__file__).with_name("decisions_child.py")
    said = output_of([sys.executable, str(child), *names], SECONDS, {"PYTHONPATH": str(folder)})
    found: dict[str, float] = json.loads(said)
    return found
