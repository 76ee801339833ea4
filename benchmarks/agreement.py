"""What it costs that the processes of a stage agree on every task: time exposed, and calls of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product, starmap
from math import inf
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from benchmarks.harness import Aim, Found, bench, on_ranks, say
from benchmarks.paced_queue import paced
from benchmarks.paced_run import StandIn
from rrfp_jax.core.events import Arrived, Chosen
from rrfp_jax.core.group import Decision, GroupProtocol
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Input, Placement
from rrfp_jax.runtime.engine.engine import agreement_of, remote_of
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.mesh.topology import Layout, Mesh
from rrfp_jax.runtime.run.consensus import KINDS, Carrier, CarrierName, Plain, StoreCarrier
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.transport.protocol import Transport
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from rrfp_jax.trace.records import Part, TaskRecord


class MemberStep(NamedTuple):
    """One step of one rank of a group, in order of dispatch; `known`: when the rank knew which task comes
    there."""

    records: Sequence[TaskRecord]
    known: Sequence[float]


def exposures(rules: StepRules, members: Sequence[MemberStep], deciders: Sequence[MemberStep]) -> list[float]:
    """For each place in the order of a stage, the seconds exposed.

    From the moment at which the device is idle and some task can run by what has arrived on every rank, to
    the moment at which every rank knows what to run. A scheduler of the same rules, told the arrivals at the
    moments when they had reached all ranks, says what can run. The device is that of whoever decides: the
    ranks' paced devices are not held together by collectives, as real ones are, and one that was once behind
    would hide the way of all later decisions."""
    records = members[0].records
    scheduler = StageScheduler(records[0].stage, rules)
    arrived = _arrivals(rules, members)
    first = records[0]
    begun = not rules.placement.needs_arrival(first.stage, first.task)
    idle = max(member.records[0].ready for member in members) if begun else -inf
    found = []
    for place, (_, task, *_) in enumerate(records):
        runnable = idle
        while (waiting := next(iter(arrived), None)) is not None:
            if arrived[waiting] > idle and scheduler.choice() is not None:
                break
            runnable = max(idle, arrived.pop(waiting))
            scheduler.handle(Arrived(waiting))
        known = max(member.known[place] for member in members)
        found.append(max(known - runnable, 0.0))
        if arrived.pop(task.input, None) is not None:  # chosen before it had arrived everywhere
            scheduler.handle(Arrived(task.input))
        scheduler.handle(Chosen(task))
        idle = max(member.records[place].end for member in deciders)
    return found


def _arrivals(rules: StepRules, members: Sequence[MemberStep]) -> dict[Input, float]:
    """When each input from another stage had reached all members, first come first."""
    stage = members[0].records[0].stage
    whole: dict[Input, float] = {}
    for member in members:
        for record in member.records:
            if rules.placement.needs_arrival(stage, record.task):
                whole[record.task.input] = max(whole.get(record.task.input, 0.0), record.ready)
    return dict(sorted(whole.items(), key=lambda item: item[1]))


class Watched:
    """A carrier that notes when (s) this process has heard of each place in the order from its leader.

    And the calls of the key-value store, if it makes any.
    """

    def __init__(self, inner: Carrier) -> None:
        self._inner = inner
        self._heard: dict[int, float] = {}
        self.calls: list[Any] = []  # from several threads
        if isinstance(inner, StoreCarrier):
            call = inner._call

            def noted(who: int, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
                self.calls.append(function)
                return call(who, seconds, function, *arguments)

            inner._call = noted  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> list[Plain]:
        come = self._inner.poll()
        for _, _, kind, message in come:
            if KINDS[kind] is Decision:
                self._heard[message[0]] = perf_counter()
        return come

    def __enter__(self) -> Watched:
        self._heard.clear()
        self._inner.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._inner.__exit__(*raised)

    def known(self, records: Sequence[TaskRecord]) -> list[float]:
        """By place in the order, when this process knew which task comes there; who decides dispatches."""
        return [self._heard.get(place, record.dispatched) for place, record in enumerate(records)]


STAGES, MICROBATCHES, LIMIT, STEPS, MESSAGE_BYTES = 2, 12, 4, 7, 4096
"""The first step is left out: how far ahead to decide is not known yet."""

CARRIERS: Sequence[CarrierName] = ("socket", "kv")
PROTOCOLS: Sequence[GroupProtocol] = ("leader", "unanimous")

SKEW = 0.5
"""Of a task's length, the most by which an arrival is late on a rank."""


@dataclass(frozen=True)
class Case:
    """Length of tasks (ms), schedule, whether arrivals are skewed, and how ranks agree."""

    task_ms: float
    schedule: str
    skewed: bool
    carrier: CarrierName
    protocol: GroupProtocol


def run(case: Case, layout: Layout, remote: Transport | None) -> dict[str, Any]:
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
        before, busy = len(watched.calls), thread_time()
        records = driver.run(rules, step, parts)
        busy = thread_time() - busy
        offset = world.clock[0]
        known = [at + offset for at in watched.known(records)]
        part = Part.of(records, *world.clock)
        calls_here = len(watched.calls) - before
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


def all_cases(lengths: Sequence[float], schedules: Sequence[str]) -> list[dict[str, Any]]:
    """All cases of this run's size of groups; all ranks do the same."""
    world = join()
    layout = Mesh(pp=STAGES, tp=world.size // STAGES).lay_out(world)
    remote = remote_of(layout, Placement(STAGES))
    cases = starmap(Case, product(lengths, schedules, (False, True), CARRIERS, PROTOCOLS))
    return [run(case, layout, remote) for case in cases]


RUN_SECONDS = 1800.0
AIM_TP, AIM_MS = 4, 30.0
LIMITS = {"socket": 0.1, "kv": 0.5}
"""Percent of a step, with BFW and a leader."""


@bench(
    "What does it cost that the processes of a stage agree on every task?",
    minutes="13",
    aims="4 processes, tasks of 30 ms, BFW, a leader: 0.1 % of a step exposed by sockets, 0.5 % by the store",
)
def agreement(
    tp: tuple[int, ...] = (2, 4, 8),
    task_ms: tuple[float, ...] = (5.0, 10.0, 30.0),
    schedule: tuple[str, ...] = ("bf", "bfw"),
) -> Found:
    """Two stages of `tp` processes each on paced devices, tasks of log-normal length (the mean is given;
    backwards take twice as long, or as I and W as long each), with and without arrivals that are late on each
    rank by up to half a task. Exposed is the time in which inputs are on all ranks, the device is idle and
    not every rank knows what to run yet. The stage that has more of it counts. Figures are medians over six
    steps, and the least of them, because other work on the machine makes everybody wait."""
    rows: list[dict[str, Any]] = []
    for size in tp:
        for row in on_ranks(STAGES * size, all_cases, task_ms, schedule, seconds=RUN_SECONDS):
            rows.append({"tp": size, **row})
            say(rows[-1])
    aims = []
    for row in rows:
        if (row["tp"], row["task_ms"], row["schedule"], row["protocol"]) == (AIM_TP, AIM_MS, "bfw", "leader"):
            skew = "with skew" if row["skewed"] else "no skew"
            name = f"tp={AIM_TP}, {AIM_MS:g} ms, BFW, {row['carrier']}, {skew}: exposed"
            aims.append(Aim(name, row["exposed_percent"], LIMITS[row["carrier"]], "%"))
    return Found({"cases": rows}, aims)
