"""Paced runs for benchmarks: real processes, messages and scheduling; and the same step simulated."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.harness import output_of
from rrfp_jax.core.admission import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.report.explanation import TimedStep
from rrfp_jax.report.run_folder import read_run
from rrfp_jax.runtime.engine.device import LEAD_SECONDS
from rrfp_jax.sim.disturbances import LateReadiness
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts
from rrfp_jax.trace.records import StepTrace

STEPS = 4
RUN_SECONDS = 300.0


class PacedTimes(NamedTuple):
    """What a paced run took.

    Attributes:
        steps: seconds of each.
        hop: its median (s); see `hop_of`.
        traced: its latest steps.
    """

    steps: Sequence[float]
    hop: float
    traced: Sequence[StepTrace]


@dataclass(frozen=True, kw_only=True)
class PacedCase:
    """A step's durations and the rules that it runs under; see `StepRules`."""

    workload: Workload
    schedule: str
    limit: int
    accumulation: Accumulation = "index"
    spare_gradients: int = SPARE_GRADIENTS

    def simulated(self, hop: float) -> float:
        """Seconds of a step; see `simulated_step`."""
        return self.simulated_step(hop).makespan

    def simulated_step(self, hop: float) -> StepTrace:
        """A step by its durations and a hop of so many seconds; nothing else takes time.

        A task is chosen as the driver does: up to `LEAD_SECONDS` before the one before it ends.
        """
        schedule = by_name(self.schedule)
        placement = schedule.placement_for(self.workload.stages)
        rules = StepRules(
            placement=placement,
            microbatches=self.workload.microbatches,
            schedule=schedule,
            limit=self.limit,
            accumulation=self.accumulation,
            spare_gradients=self.spare_gradients,
        )
        costs = LateReadiness(WorkloadCosts(self.workload, placement), hop)
        return simulate(rules, costs, lead=LEAD_SECONDS)

    def run(self) -> PacedTimes:
        """A paced run in as many processes as stages.

        Raises:
            RuntimeError: the run failed; with what it said.
        """
        fields = {"accumulation": self.accumulation, "spare_gradients": self.spare_gradients}
        steps = run_paced(self.workload, self.schedule, self.limit, STEPS, fields)
        traced = [step.recorded.trace for step in steps]
        return PacedTimes([trace.makespan for trace in traced], hop_of(traced, self.workload), traced)


def run_paced(
    workload: Workload,
    schedule: str,
    limit: int,
    steps: int,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Sequence[TimedStep]:
    """The latest steps of a paced run in as many processes as stages.

    Args:
        workload: of every step.
        schedule: by name.
        limit: most microbatches in flight.
        steps: how many run.
        fields: of the config besides.

    Raises:
        RuntimeError: the run failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "workload.json").write_text(json.dumps(workload.as_json_object()), encoding="utf-8")
        flags = {"schedule": schedule, "max_in_flight": limit, "steps": steps, **fields}
        launched = ("rrfp_jax", "launch", "-n", str(workload.stages), "-m", "benchmarks.paced_run")
        return run_steps(
            "configs/quickstart.py", folder, flags, (*launched, f"--workload={folder / 'workload.json'}")
        )


def run_steps(
    config: str,
    folder: Path,
    fields: Mapping[str, Any],
    launched: Sequence[str] = (
        "rrfp_jax",
        "launch",
    ),
) -> Sequence[TimedStep]:
    """The latest steps of a run of a config in processes of its own, with its files in `folder`.

    Args:
        config: its file.
        folder: for the files.
        fields: of the config.
        launched: the module that starts the run, and its own arguments.

    Raises:
        RuntimeError: the run failed; with what it said.
    """
    command = [
        *(sys.executable, "-m", *launched, f"--config={config}", f"--config.directory={folder}"),
        *(f"--config.{flag}={value}" for flag, value in fields.items()),
    ]
    output_of(command, RUN_SECONDS)
    return read_run(folder / "quickstart").steps


def hop_of(steps: Iterable[StepTrace], workload: Workload) -> float:
    """Median seconds from the end of a task, and its transfer by the workload, to its receiver's `ready`."""
    return statistics.median(
        receiver.ready - sender.end - costs.transfer(sender.stage, sender.task)
        for step in steps
        for costs in [WorkloadCosts(workload, step.placement)]
        for sender, receiver in step.transfers()
    )
