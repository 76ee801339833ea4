"""How fast the simulator is, and whether its cost per task grows with the step.

    python -m benchmarks.studies.sim_speed [--json=FILE] [--check]

Steps of 10^4, 10^5 and 10^6 tasks on 8 stages (log-normal durations, sd 0.3, transfers of a tenth of a
forward, at most 32 microbatches in flight): from the workload to the recorded trace, in seconds of one core,
the fastest of several runs. The aims are for BF.
"""

from __future__ import annotations

import gc
import sys
from time import process_time
from typing import Any

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts, log_normal

STAGES, LIMIT = 8, 32
SCHEDULES = ("bf", "1f1b", "bfw")
RUNS = {10**4: 10, 10**5: 3, 10**6: 2}
"""How often a step of so many tasks is simulated."""


def seconds_and_tasks(workload: Workload, schedule: str) -> tuple[float, int]:
    """CPU time of one simulation, and how many tasks it had."""
    gc.collect()  # what the run before has left is not this one's
    began = process_time()
    placement = Placement(workload.stages)
    rules = StepRules(
        placement=placement, microbatches=workload.microbatches, schedule=by_name(schedule), limit=LIMIT
    )
    trace = simulate(rules, WorkloadCosts(workload, placement))
    return process_time() - began, len(trace.records)


def measure(schedule: str, tasks: int) -> dict[str, Any]:
    """One row: microseconds per task, the fastest run of steps with about so many tasks."""
    kinds = 3 if schedule == "bfw" else 2
    workload = log_normal(
        STAGES, tasks // (kinds * STAGES), forward=0.01, sigma=0.3, shared=0.5, seed=0, transfer=0.001
    )
    runs = [seconds_and_tasks(workload, schedule) for _ in range(RUNS[tasks])]
    fastest = min(seconds / count for seconds, count in runs)
    return {"schedule": schedule, "tasks": runs[0][1], "us_per_task": 1e6 * fastest}


def main() -> int:
    """Run all cases, print, write."""
    options = parse(__doc__).parse_args()
    costs: dict[str, list[float]] = {}
    rows = []
    for schedule in SCHEDULES:
        for tasks in RUNS:
            rows.append(row := measure(schedule, tasks))
            costs.setdefault(schedule, []).append(row["us_per_task"])
            cost, rate = row["us_per_task"], 1e6 / row["us_per_task"]
            print(f"{schedule:5} {row['tasks']:8d} tasks: {cost:5.2f} us a task, {rate:7.0f} a second")
    growth = 100 * (costs["bf"][-1] / costs["bf"][0] - 1)
    aims = [
        Aim("a task of BF", max(costs["bf"]), 10.0, "us"),
        Aim("growth of that from 10^4 to 10^6 tasks", growth, 30.0, "%"),
    ]
    return finish(options, {"cases": rows}, aims)


if __name__ == "__main__":
    sys.exit(main())
