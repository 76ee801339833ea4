"""A run on paced devices: a stand-in for the model, everything else as in training.

    rrfp launch -n STAGES -m benchmarks.paced_run --workload=W.json [--message-bytes=N] --config=FILE.py \\
        [--config.FIELD=VALUE ...]

Files and flags are those of a named run, without loss, validation and optimizer; see benchmarks/paced.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.paced_queue import paced
from rrfp_jax.commands.command_line import exit_status
from rrfp_jax.commands.config_line import read_config_line
from rrfp_jax.commands.overrides import config_of
from rrfp_jax.commands.simulation import simulation_inputs
from rrfp_jax.core.footprint import Footprint
from rrfp_jax.core.hints import Hint
from rrfp_jax.core.tasks import Task
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_fields
from rrfp_jax.printing import say
from rrfp_jax.report.perfetto import write_trace
from rrfp_jax.report.store import STEPS, TRACED_STEPS
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runs.files import RunFiles
from rrfp_jax.runtime.engine.device import LEAD_SECONDS
from rrfp_jax.runtime.engine.engine import agreement_of, remote_of
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.settings import Settings, check_order
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.recorder import RunPhase
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.stages.step import Meter
from rrfp_jax.sim.choice import Auto, Candidate, choose
from rrfp_jax.sim.planned import Planned, base_of
from rrfp_jax.trace.costs import Workload, WorkloadCosts
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace
from rrfp_jax.train.named import read_schedule
from rrfp_jax.train.report import summary_of_idleness

MOST_BYTES = 2**30
"""Of a message; every stage holds some of them."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Devices that last as a workload says; messages, transfers and scheduling are real.

    Attributes:
        workload: JSON file with the seconds of every task and transfer, which also says how many stages and
            microbatches there are.
        message_bytes: of every activation and gradient."""

    workload: str
    message_bytes: int = 65536

    def __post_init__(self) -> None:
        check_fields(self)
        if self.message_bytes < 1:
            raise UsageError(f"message_bytes={self.message_bytes}: a message has at least one byte")
        if self.message_bytes > MOST_BYTES:
            raise UsageError(f"message_bytes={self.message_bytes}: give at most {MOST_BYTES} bytes")
        self.table  # noqa: B018 (read now, so that a bad one is refused at once)

    @cached_property
    def table(self) -> Workload:
        return simulation_inputs(Path(self.workload), 1, None, 1, 1)[0].actual


@dataclass(frozen=True, kw_only=True)
class PacedReport:
    """One step on paced devices; see `Report` for the fields."""

    recorded: RecordedStep
    wall_seconds: float
    ranks: Sequence[Sequence[int]]

    @property
    def trace(self) -> StepTrace:
        return self.recorded.trace

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.trace.step,
            "step_seconds": self.trace.makespan,
            "wall_seconds": self.wall_seconds,
            "bubble": self.trace.bubble(),
        }

    def __str__(self) -> str:
        idle = summary_of_idleness(self.trace.bubble())
        return f"step {self.trace.step:5d}  {self.trace.makespan * 1e3:7.1f} ms  idle {idle}"


class StandIn:
    """A stage whose programs pass messages on: each adds one to every byte that it was sent."""

    phase: str = "paced"

    def __init__(self, message_bytes: int, microbatches: int, chunks: int, device: jax.Device) -> None:
        where = SingleDeviceSharding(device)
        spec = jax.ShapeDtypeStruct((message_bytes,), jnp.uint8, sharding=where)
        self.buckets: Sequence[int] = [0] * microbatches
        self.shapes: Sequence[int] = self.buckets
        self.meter = Meter([[_messages(message_bytes)] * chunks], self.buckets)
        self._source = jax.device_put(np.zeros(message_bytes, np.uint8), where)
        self._program = jax.jit(lambda x: x + 1, out_shardings=where).lower(spec).compile()
        self._arrived: dict[Task, jax.Array] = {}

    def receive(self, task: Task, arrays: Sequence[jax.Array]) -> None:
        (self._arrived[task],) = arrays

    def run(self, task: Task, in_turn: bool) -> tuple[Sequence[jax.Array], jax.Array]:
        output = self._program(self._arrived.pop(task, self._source))
        return [output], output

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """There are no gradients."""

    def finish(self) -> None:
        """There are no gradients."""


def _chosen(auto: Auto, workload: Workload, mesh: Mesh, settings: Settings, rank: int) -> Hint:
    """The hint for what the workload says, the same on all processes; rank 0 says it."""
    candidates: dict[str, Candidate | str] = {}
    for name, hint in auto.hints.items():
        try:
            rules = settings.rules(mesh.placement(hint), workload.microbatches, hint)
            candidates[name] = Candidate(rules=rules, costs=WorkloadCosts(workload, rules.placement))
        except UsageError as error:
            candidates[name] = str(error)
    try:
        choice = choose(candidates)
    except ValueError as error:
        raise UsageError(f"schedule='auto': {error}") from None
    if rank == 0:
        say(f"schedule auto: {choice}")
    return auto.hints[choice.name]


def _messages(size: int) -> Footprint:
    """What a stand-in takes of memory: messages, and nothing between them."""
    return Footprint(
        activation_in_bytes=size,
        activation_out_bytes=size,
        gradient_in_bytes=size,
        gradient_out_bytes=size,
        held_after_forward_bytes=0,
        held_after_input_bytes=0,
    )


class PacedRun:
    """The steps of a run on paced devices. Made by all its processes together."""

    def __init__(self, config: RunConfig, pace: Pace) -> None:
        workload = pace.table
        if config.mesh.share_devices:
            raise UsageError("mesh.share_devices with a workload: every paced stage has a device of its own")
        if config.mesh.dp > 1:
            raise UsageError(f"mesh.dp={config.mesh.dp} with a workload: there are no gradients to add up")
        mesh = replace(config.mesh, pp=workload.stages)
        layout, settings = mesh.lay_out(join()), config.settings.limited(workload.stages)
        schedule = read_schedule(config.schedule)
        if isinstance(schedule, Auto):
            schedule = _chosen(schedule, workload, mesh, settings, layout.world.rank)
        placement = mesh.placement(base_of(schedule))
        self.steps_done = 0
        self._recorded: deque[RecordedStep] = deque(maxlen=TRACED_STEPS)
        self._world = layout.world
        delays = settings.injected
        self._world.waits.stall_seconds = settings.stall_seconds
        costs = WorkloadCosts(workload, placement)
        self._rules = settings.rules(placement, workload.microbatches, base_of(schedule))
        check_order(self._rules)
        if isinstance(schedule, Planned):  # what the workload says is all that there is to be known
            self._rules = replace(self._rules, schedule=schedule.plan(self._rules, costs).order)
        agreed = {"rules": str(self._rules), "delays": str(delays), "agreement": settings.agreement}
        agreed["protocol"] = settings.protocol
        agreed["transport"] = settings.transport
        tables = sha256(repr(workload).encode()).hexdigest()[:16]
        self._world.agree("what is to be run", agreed | {"the hash of the workload": tables})
        self._member, self._grouped, self._ranks = layout.member, layout.grouped, layout.groups
        devices = {stage: stage_mesh.own[:1] for stage, stage_mesh in layout.stage_meshes.items()}
        self._driver = Driver(
            devices,
            self._world,
            remote_of(layout, placement, settings.transport),
            settings.stall_seconds,
            paced(delays, costs),
            agreement=agreement_of(layout, settings.agreement, settings.protocol),
            delays=delays.arrivals(placement, costs, layout.world.rank),
            name=layout.name,
        )
        message = (((pace.message_bytes,), "uint8"),)
        self._driver.reserve({stage: [message] for stage in devices})
        self._parts = {
            stage: StandIn(pace.message_bytes, workload.microbatches, placement.chunks, device)
            for stage, (device,) in devices.items()
        }
        # So that the first step waits for nobody's start.
        self._world.gather("everybody to be ready", None, START_SECONDS)

    def write_trace(self, path: Path) -> None:
        """The latest steps as a trace that Perfetto opens."""
        write_trace(path, {"run": self._recorded})

    def steps(self, count: int) -> Iterator[PacedReport]:
        """Run `count` steps, giving each one's report."""
        for step in range(count):
            began = perf_counter()
            self._world.recorder.phase(RunPhase("step", step))
            records = self._driver.run(self._rules, step, self._parts)
            told = self._member, Part.of(records, *self._world.clock)
            gathered = self._driver.gather(f"the end of step {step}", told, records, step)
            parts = [Part(*plain) for member, plain in gathered if member == 0]
            trace = StepTrace(step, self._rules.placement, parts)
            recorded = RecordedStep(
                trace=trace,
                rules=self._rules,
                buckets=[str(j) for j in range(self._rules.microbatches)],  # each has times of its own
                grouped=self._grouped,
                lead=LEAD_SECONDS,
            )
            self._recorded.append(recorded)
            self.steps_done += 1
            wall_seconds = perf_counter() - began
            yield PacedReport(recorded=recorded, wall_seconds=wall_seconds, ranks=self._ranks)


def run_paced(argv: Sequence[str]) -> int:
    """What each rank runs; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", required=True, metavar="FILE.json", help="how long everything takes")
    parser.add_argument("--message-bytes", type=int, default=65536, metavar="N", help="of a message (65536)")
    options, others = parser.parse_known_args(argv)
    world = join()
    pace = Pace(workload=options.workload, message_bytes=options.message_bytes)
    config = config_of(read_config_line(others))
    if config.settings.budget not in (None, "auto"):
        raise UsageError(
            f"activation_budget={config.activation_budget} with a workload: a stand-in for the model "
            f"holds nothing that could be limited; leave one of them out"
        )
    run, tell = PacedRun(config, pace), say if world.rank == 0 else (lambda line: None)
    tell(
        f"rrfp_jax on paced devices; {config.name}: {config.steps} steps, {pace.table.stages} stages, "
        f"{pace.table.microbatches} microbatches, messages of {pace.message_bytes} bytes, "
        f"schedule {config.schedule}, jitter {config.injected.jitter}"
    )
    files = RunFiles(config, world, {STEPS: run.write_trace, "trace.json": run.write_trace}, say=tell)
    with files:
        for report in run.steps(config.steps):
            files.add(replace(report.recorded, ranks=report.ranks), report.as_dict())
            tell(str(report))
    tell(
        f"files: {files.folder}/config.json, metrics.jsonl, {STEPS}, trace.json (open it at ui.perfetto.dev)"
    )
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status("paced_run", lambda: run_paced(sys.argv[1:])))
