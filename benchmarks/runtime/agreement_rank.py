"""One of the processes that `benchmarks.runtime.agreement` starts: two stages, all cases of a size of groups.

rrfp launch -n N -m benchmarks.runtime.agreement_rank FILE TASK_MS,...

Runs every case on paced devices. Rank 0 writes a list of cases with what they cost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

from benchmarks.paced_queue import paced
from benchmarks.paced_run import StandIn
from benchmarks.runtime.exposure import MemberStep, exposures
from benchmarks.runtime.watched import Watched
from rrfp_jax.core.group import GroupProtocol
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.runtime.engine.engine import agreement_of, remote_of
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.mesh.topology import Layout, Mesh
from rrfp_jax.runtime.run.consensus import CarrierName
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.transport.protocol import Transport
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from rrfp_jax.trace.records import Part

STAGES, MICROBATCHES, LIMIT, STEPS, MESSAGE_BYTES = 2, 12, 4, 7, 4096
"""The first step is left out: how far ahead to decide is not known yet."""

CARRIERS: Sequence[CarrierName] = ("socket", "kv")
PROTOCOLS: Sequence[GroupProtocol] = ("leader", "unanimous")

SKEW = 0.5
"""Of a task's length, the most by which an arrival is late on a rank."""


@dataclass(frozen=True, kw_only=True)
class AgreementCase:
    """What is measured: length of tasks (ms), schedule, whether arrivals are skewed, and how ranks agree."""

    task_ms: float
    schedule: str
    skewed: bool
    carrier: CarrierName
    protocol: GroupProtocol


def cases(lengths: Sequence[float]) -> Iterator[AgreementCase]:
    """All of them."""
    everything = product(lengths, ("bf", "bfw"), (False, True), CARRIERS, PROTOCOLS)
    for task_ms, schedule, skewed, carrier, protocol in everything:
        yield AgreementCase(
            task_ms=task_ms, schedule=schedule, skewed=skewed, carrier=carrier, protocol=protocol
        )


def run(case: AgreementCase, layout: Layout, remote: Transport | None) -> dict[str, Any]:
    """One case; all processes call this together, and get the same figures."""
    world, placement, seconds = layout.world, Placement(STAGES), case.task_ms / 1000
    workload = log_normal(STAGES, MICROBATCHES, forward=seconds, sigma=0.3, shared=0.5, seed=1)
    schedule, costs = by_name(case.schedule), WorkloadCosts(workload, placement)
    rules = StepRules(placement=placement, microbatches=MICROBATCHES, schedule=schedule, limit=LIMIT)
    delays = Delays(skew=SKEW * seconds if case.skewed else 0.0)
    agreement = agreement_of(layout, case.carrier, case.protocol)
    assert agreement is not None
    agreement.carrier = watched = Watched(agreement.carrier)
    driver = Driver(
        {stage: own[:1] for stage, own in layout.devices.items()},
        world,
        remote,
        queue=paced(delays, costs),
        agreement=agreement,
        delays=delays.arrivals(placement, costs, world.rank),
        name=layout.name,
    )
    parts = {s: StandIn(MESSAGE_BYTES, MICROBATCHES, 1, device) for s, (device,) in layout.devices.items()}
    world.gather("everybody to be ready", None, START_SECONDS)
    steps, leads, calls, busy_seconds = [], [], 0, []
    for step in range(STEPS):
        before, busy = agreement.carrier.calls, thread_time()
        records = driver.run(rules, step, parts)
        busy = thread_time() - busy
        offset = world.clock[0]
        known = [at + offset for at in watched.known(records)]
        part = Part.of(records, *world.clock)
        calls_here = agreement.carrier.calls - before
        told = [part, known, calls_here, busy / len(records)]
        gathered = driver.gather(f"the end of step {step}", told, records, step)
        if step:
            leads.append(agreement.lead)
            calls += sum(own for _, _, own, _ in gathered)
            busy_seconds += [own for *_, own in gathered]
            members = [MemberStep(Part(*part).records(), known) for part, known, *_ in gathered]
            steps.append(_figures(rules, members, layout.groups, case.protocol))
    agreement.carrier.close()
    shares = sorted(100 * own["exposed"] / own["seconds"] for own in steps)
    return asdict(case) | {
        "exposed_us_per_task": 1e6 * median(own["exposed_per_task"] for own in steps),
        "exposed_percent": median(shares),
        "quietest_percent": shares[0],
        "worst_percent": shares[-1],
        "step_seconds": median(own["seconds"] for own in steps),
        "lead_ms": 1e3 * median(leads),
        "driver_us_per_task": 1e6 * median(busy_seconds),
        "store_calls_per_task": calls / sum(own["tasks"] for own in steps),
    }


def _figures(
    rules: StepRules, members: Sequence[MemberStep], groups: Sequence[Sequence[int]], protocol: GroupProtocol
) -> dict[str, float]:
    """Seconds of a step; of them those exposed on the stage that has more, per task, too; tasks of all."""
    exposed, tasks = [], []
    for group in groups:
        own = [members[rank] for rank in group]
        exposed.append(sum(exposures(rules, own, own[:1] if protocol == "leader" else own)))
        tasks.append(len(own[0].records))
    most, its_tasks = max(zip(exposed, tasks, strict=True))
    start = min(record.dispatched for member in members for record in member.records)
    end = max(record.end for member in members for record in member.records)
    return {
        "exposed": most,
        "exposed_per_task": most / its_tasks,
        "seconds": end - start,
        "tasks": sum(tasks),
    }


def main(file: Path, lengths: Sequence[float]) -> None:
    """All cases of this run's size of groups."""
    world = join()
    layout = Mesh(pp=STAGES, tp=world.size // STAGES).lay_out(world)
    remote = remote_of(layout, Placement(STAGES))
    found = []
    for case in cases(lengths):
        found.append(run(case, layout, remote))
        if layout.world.rank == 0:
            print(json.dumps(found[-1]), flush=True)
            file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [float(text) for text in sys.argv[2].split(",")])
