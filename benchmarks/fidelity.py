"""Paced runs against what their durations say: how far real scheduling and messages are from ideal.

    python -m benchmarks.fidelity [--json=FILE] [--check] [--quick] [--schedule=NAME ...]

For stages x microbatches x task length x schedule a workload is drawn (log-normal, sd 0.3, half of the
variance common to all tasks of a microbatch) and run on paced devices by as many processes. Beside it stands
the step time simulated with the same durations and the measured hop: the time between the end of a task and
the moment the next stage knows, median over the run's own transfers.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.tasks import Placement
from rrfp_jax.core.trace import StepTrace
from rrfp_jax.core.workload import Workload, log_normal
from rrfp_jax.runtime.device import LEAD_SECONDS
from rrfp_jax.sim.costs import WorkloadCosts
from rrfp_jax.sim.disturbances import LateReadiness
from rrfp_jax.sim.engine import simulate
from rrfp_jax.train.tracefile import read_trace

REPOSITORY = Path(__file__).parent.parent
SCHEDULES = ("1f1b", "gpipe", "bf", "bfw", "zb-h1")
STEPS, LIMIT = 4, 8
RUN_SECONDS = 300.0


def simulated_step(workload: Workload, schedule: str, hop: float) -> float:
    """Seconds of a step by its durations and a hop of so many seconds; nothing else takes time.

    A task is chosen as the driver does: up to `LEAD_SECONDS` before the one before it ends.
    """
    placement = Placement(workload.stages)
    rules = StepRules(
        placement=placement, microbatches=workload.microbatches, schedule=by_name(schedule), limit=LIMIT
    )
    costs = LateReadiness(WorkloadCosts(workload, placement), hop)
    return simulate(rules, costs, lead=LEAD_SECONDS).makespan


def real_run(workload: Workload, schedule: str, jitter: str = "J0") -> tuple[list[float], float]:
    """Step times (s) of a paced run in as many processes as stages, and its median hop (s)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "workload.json").write_text(json.dumps(workload.as_json_object()), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "launch.local", "--config=configs/quickstart.py"),
            *(f"--config.pace.workload={folder}/workload.json", f"--config.schedule={schedule}"),
            *(f"--config.max_in_flight={LIMIT}", f"--config.steps={STEPS}", f"--config.directory={folder}"),
            f"--config.jitter={jitter}",
        ]
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        lines = (folder / "quickstart" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        (traced,) = read_trace(folder / "quickstart" / "trace.json").values()
    return [json.loads(line)["step_seconds"] for line in lines], hop_of(traced, workload)


def hop_of(steps: Iterable[StepTrace], workload: Workload) -> float:
    """Median seconds from the end of a task, and its transfer by the workload, to its receiver's `ready`."""
    return statistics.median(
        receiver.ready - sender.end - workload.transfer(sender.stage, sender.task)
        for step in steps
        for sender in step.records
        if (receiver := step.receiver(sender)) is not None
    )


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each schedule")
    parser.add_argument(
        "--schedule", action="append", choices=SCHEDULES, metavar="NAME", help="again for each; all if none"
    )
    options = parser.parse_args()
    cases = itertools.product((4, 8), (16, 32), (0.01, 0.03), options.schedule or SCHEDULES)
    rows = []
    for stages, microbatches, seconds, schedule in cases:
        if options.quick and (stages, microbatches, seconds) != (4, 16, 0.01):
            continue
        rows.append(row := measure(stages, microbatches, seconds, schedule))
        print(
            f"{stages} stages, {microbatches} microbatches, {seconds * 1e3:.0f} ms, {schedule:5}: real "
            f"{row['real']:.4f} s, simulated {row['simulated']:.4f} s, off by {row['percent']:+.2f} %, "
            f"hop {row['hop_us']:.0f} us",
            flush=True,
        )
    off = np.abs([row["percent"] for row in rows])
    aims = [
        Aim("median difference", float(np.median(off)), 3.0, "%"),
        Aim("worst difference", float(np.max(off)), 5.0, "%"),
    ]
    return finish(options, {"cases": rows}, aims)


def measure(stages: int, microbatches: int, seconds: float, schedule: str) -> dict[str, Any]:
    """One case: the median real step, the simulated one, and their difference."""
    workload = log_normal(stages, microbatches, forward=seconds, sigma=0.3, shared=0.5, seed=1)
    steps, hop = real_run(workload, schedule)
    real, simulated = float(np.median(steps)), simulated_step(workload, schedule, hop)
    return {
        **{"stages": stages, "microbatches": microbatches, "seconds": seconds, "schedule": schedule},
        **{
            "real": real,
            "simulated": simulated,
            "percent": 100 * (real / simulated - 1),
            "hop_us": hop * 1e6,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
