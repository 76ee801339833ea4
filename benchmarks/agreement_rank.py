"""One of the processes that `benchmarks.agreement` starts: two stages, all cases of a size of groups.

rrfp-launch -n N -m benchmarks.agreement_rank FILE TASK_MS,...

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
from typing import Any

from benchmarks.exposure import MemberStep, exposures
from rrfp_jax.core.costs import WorkloadCosts
from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.tasks import Placement
from rrfp_jax.core.trace import Part
from rrfp_jax.core.workload import log_normal
from rrfp_jax.runtime.agreement import CarrierName, Protocol, Terms
from rrfp_jax.runtime.delays import Delays
from rrfp_jax.runtime.driver import Driver
from rrfp_jax.runtime.join import join
from rrfp_jax.runtime.topology import Layout, Mesh
from rrfp_jax.runtime.transport import Transport
from rrfp_jax.runtime.world import START_SECONDS
from rrfp_jax.train.paced import StandIn

STAGES, MICROBATCHES, LIMIT, STEPS, MESSAGE_BYTES = 2, 12, 4, 7, 4096
"""The first step is left out: how far ahead to decide is not known yet."""

CARRIERS: Sequence[CarrierName] = ("socket", "kv")
PROTOCOLS: Sequence[Protocol] = ("leader", "unanimous")

SKEW = 0.5
"""Of a task's length, the most by which an arrival is late on a rank."""


@dataclass(frozen=True, kw_only=True)
class AgreementCase:
    """What is measured: length of tasks (ms), schedule, whether arrivals are skewed, and how ranks agree."""

    task_ms: float
    schedule: str
    skewed: bool
    carrier: CarrierName
    protocol: Protocol


def cases(lengths: Sequence[float]) -> Iterator[AgreementCase]:
    """All of them."""
    everything = product(lengths, ("bf", "bfw"), (False, True), CARRIERS, PROTOCOLS)
    for task_ms, schedule, skewed, carrier, protocol in everything:
        yield AgreementCase(
            task_ms=task_ms, schedule=schedule, skewed=skewed, carrier=carrier, protocol=protocol
        )


def run(case: AgreementCase, layout: Layout, transport: Transport) -> dict[str, Any]:
    """One case; all processes call this together, and get the same figures."""
    world, placement, seconds = layout.world, Placement(STAGES), case.task_ms / 1000
    workload = log_normal(STAGES, MICROBATCHES, forward=seconds, sigma=0.3, shared=0.5, seed=1)
    schedule, costs = by_name(case.schedule), WorkloadCosts(workload, placement)
    rules = StepRules(placement=placement, microbatches=MICROBATCHES, schedule=schedule, limit=LIMIT)
    delays = Delays(skew=SKEW * seconds if case.skewed else 0.0)
    agreement = layout.agreement(Terms(carrier=case.carrier, protocol=case.protocol))
    assert agreement is not None
    driver = Driver(
        layout.devices,
        world,
        delays.transport(transport, placement, costs, world.rank),
        queue=delays.queue(costs),
        agreement=agreement,
    )
    parts = {s: StandIn(MESSAGE_BYTES, MICROBATCHES, 1, device) for s, device in layout.devices.items()}
    world.gather("everybody to be ready", None, START_SECONDS)
    steps, leads = [], []
    calls = 0
    for step in range(STEPS):
        before = agreement.carrier.calls
        records = driver.run(rules, step, parts)
        offset = world.clock[0]
        known = [agreement.decided[place] + offset for place in range(len(records))]
        part = Part.of(records, *world.clock).plain()
        told = [part, known, agreement.account(records), agreement.carrier.calls - before]
        gathered = world.gather(f"the end of step {step}", told)
        agreement.settle([account for _, _, account, _ in gathered], step)
        if step:
            leads.append(agreement.lead)
            calls += sum(own for *_, own in gathered)
            members = [MemberStep(Part(*part).records(), known) for part, known, _, _ in gathered]
            steps.append(_figures(rules, members, layout.groups, case.protocol))
    tasks = STAGES * len(records)
    shares = sorted(100 * own["exposed"] / own["seconds"] for own in steps)
    return asdict(case) | {
        "exposed_us_per_task": median(own["exposed"] for own in steps) * 1e6 / len(records),
        "exposed_percent": median(shares),
        "quietest_percent": shares[0],
        "worst_percent": shares[-1],
        "step_seconds": median(own["seconds"] for own in steps),
        "lead_ms": 1e3 * median(leads),
        "store_calls_per_task": calls / (STEPS - 1) / tasks,
    }


def _figures(
    rules: StepRules, members: Sequence[MemberStep], groups: Sequence[Sequence[int]], protocol: Protocol
) -> dict[str, float]:
    """Seconds of a step, and of them those exposed on the stage that has more."""
    exposed = []
    for group in groups:
        own = [members[rank] for rank in group]
        exposed.append(sum(exposures(rules, own, own[:1] if protocol == "leader" else own)))
    start = min(record.dispatched for member in members for record in member.records)
    end = max(record.end for member in members for record in member.records)
    return {"exposed": max(exposed), "seconds": end - start}


def main(file: Path, lengths: Sequence[float]) -> None:
    """All cases of this run's size of groups."""
    layout = Mesh(pp=STAGES, tp=join().size // STAGES).lay_out()
    transport = layout.transport(Placement(STAGES))
    found = []
    for case in cases(lengths):
        found.append(run(case, layout, transport))
        if layout.world.rank == 0:
            print(json.dumps(found[-1]), flush=True)
            file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [float(text) for text in sys.argv[2].split(",")])
