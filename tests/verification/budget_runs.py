"""Byte budgets: kept whatever the delays, never a deadlock, and what they cost in step time.

    python -m tests.verification.budget_runs [--json=FILE] [--check] [--runs=1000] [--cases=1000]

1. Small random steps in the pure core, all interleavings of each: the bytes on every stage, counted from
   what has happened, with messages at both ends until they arrive, never exceed its room.
2. Random steps of the real driver in one process, 1 to 4 stages, arrivals delayed so that their order
   changes: the runtime's own count never exceeds the budget, and every step ends.
3. Step time with 1, 1.5, 2 and 4 times the bytes that 1F1B holds on its largest stage, over that without a
   limit: the real driver on paced devices, and simulated.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Aim, finish, parse
from benchmarks.paced_queue import PacedQueue
from rrfp_jax.core.footprint import Chunks, Footprint, least_room, order_peaks, step_budgets
from rrfp_jax.core.hints import BF, BFW, BPriority, FPriority, Ranked
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import FORWARD, WEIGHT, Placement, Task
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.engine.device import Running
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.pacing import ArrivalDelays
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.step import Meter
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts, log_normal
from rrfp_jax.trace.records import TaskRecord
from tests.verification.exploration import cases
from tests.verification.exploration.cases import footprints_of, schedules
from tests.verification.exploration.space import explore
from tests.verification.exploration.visits import Violation

STALL_SECONDS = 20.0
LONGEST_SECONDS = 1e-3
UNIT = 64
"""Bytes that stand for one in random footprints."""


class Courier:
    """A stage that computes nothing and sends messages of the sizes that its footprints say."""

    phase = "budgeted"

    def __init__(self, footprints: Sequence[Chunks], buckets: Sequence[int], device: jax.Device) -> None:
        self.buckets = self.shapes = buckets
        self.meter = Meter(footprints, buckets)
        self._footprints, self._device = footprints, device
        self._expected: dict[Task, int] = {}

    def receive(self, task: Task, arrays: Sequence[jax.Array]) -> None:
        """See `StageStep.receive`; what arrives must be as large as the footprint says."""
        own = self._footprints[self.buckets[task.microbatch]][task.chunk]
        size = own.activation_in_bytes if task.kind is FORWARD else own.gradient_in_bytes
        assert sum(array.nbytes for array in arrays) == size

    def run(self, task: Task, in_turn: bool) -> tuple[Sequence[jax.Array], None]:
        """See `StageStep.run`."""
        own = self._footprints[self.buckets[task.microbatch]][task.chunk]
        size = {FORWARD: own.activation_out_bytes, WEIGHT: 0}.get(task.kind, own.gradient_out_bytes)
        return [message(size, self._device)], None

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """There are no gradients."""

    def finish(self) -> None:
        """There are no gradients."""


@cache
def message(size: int, device: jax.Device) -> jax.Array:
    """An array of so many bytes, the same one each time."""
    array: jax.Array = jax.device_put(np.zeros(size, np.uint8), device)
    return array


@dataclass(frozen=True)
class Outcome:
    """What a step gave: its tasks, and by stage the most bytes that there were."""

    records: Sequence[TaskRecord]
    peaks: Sequence[int]

    @property
    def seconds(self) -> float:
        """From the first dispatch to the last end."""
        return max(r.end for r in self.records) - min(r.dispatched for r in self.records)


def run(
    rules: StepRules,
    footprints: Sequence[Sequence[Chunks]],
    buckets: Sequence[int],
    budgets: Sequence[Budget | None],
    seconds: Callable[[Running], float],
    delay: Callable[[], float] | None = None,
) -> Outcome:
    """One step in this process, every stage on a device of its own."""
    devices = dict(enumerate(jax.local_devices()[: rules.placement.stages]))
    driver = Driver(
        {stage: (device,) for stage, device in devices.items()},
        World(),
        None,
        STALL_SECONDS,
        lambda name, wake: PacedQueue(name, wake, seconds),
        delays=None if delay is None else ArrivalDelays(lambda _, now: (now + delay(), 0.0)),
    )
    parts = {stage: Courier(footprints[stage], buckets, device) for stage, device in devices.items()}
    records = driver.run(rules, 0, parts, budgets)
    return Outcome(records, [part.meter.peak for part in parts.values()])


@dataclass(frozen=True)
class Drawn:
    """A random step, and what its stages may hold at least or a little more."""

    rules: StepRules
    footprints: Sequence[Sequence[Chunks]]
    buckets: Sequence[int]
    totals: Sequence[int]
    budgets: Sequence[Budget | None]
    seed: int

    def run(self) -> Outcome:
        """Run it, arrivals and tasks delayed at random."""
        draw = random.Random(self.seed)
        longest = draw.choice([0.0, LONGEST_SECONDS])
        return run(
            *(self.rules, self.footprints, self.buckets, self.budgets),
            seconds=lambda running: draw.uniform(0, longest),
            delay=lambda: draw.choice([0.0, draw.uniform(0, 3 * LONGEST_SECONDS)]),
        )


def drawn(seed: int) -> Drawn:
    """1 to 4 stages, 1 or 2 chunks, two kinds of microbatches, hints with and without split backward."""
    draw = random.Random(seed)
    placement = Placement(draw.randint(1, 4), draw.randint(1, 2), draw.choice(["looped", "v"]))
    microbatches = draw.randint(2, 10)
    buckets = [draw.randrange(2) for _ in range(microbatches)]
    rankings = [hint for hint in schedules(placement, microbatches) if isinstance(hint, Ranked)]
    rules = StepRules(
        placement=placement,
        microbatches=microbatches,
        schedule=draw.choice([BF(), BFW(), FPriority(), BPriority(), *rankings]),
        accumulation=draw.choice(["index", "arrival"]),
        spare_gradients=draw.randint(0, 2),
        limit=draw.choice([None, None, None, draw.randint(1, 4)]),
    )
    footprints = list(footprints_of(draw, placement, unit=UNIT))
    spare = draw.choice([0, 4, 16]) * UNIT
    rooms = [least_room([own[b] for b in set(buckets)]) + draw.randint(0, spare) for own in footprints]
    transients = [max(c.most_transient_bytes for b in set(buckets) for c in own[b]) for own in footprints]
    totals = [room + transient for room, transient in zip(rooms, transients, strict=True)]
    budgets = step_budgets(rooms, footprints, buckets, rules.limit, rules.charges_by_chunk)
    return Drawn(rules, footprints, buckets, totals, budgets, seed)


STAGES, MICROBATCHES = 4, 32
FORWARD_SECONDS = 0.01
FACTORS = (1.0, 1.5, 2.0, 4.0)
HINTS = ("bf", "bfw")
STEPS = 5
KIB = 1024
MOST = "most_of_1f1b_bytes"


def explored(count: int) -> dict[str, int]:
    """Random small steps, all of their states; how many broke a rule."""
    states, broken = 0, 0
    for seed in range(count):
        try:
            states += explore(cases.drawn(seed)).states
        except Violation as violation:
            print(f"case {seed}: {violation}")
            broken += 1
    return {"cases": count, "states": states, "broken": broken}


def random_runs(runs: int) -> dict[str, int]:
    """Random steps of the real driver; how many stood still, or held more than they may."""
    stuck = over = full = 0
    for seed in range(runs):
        step = drawn(seed)
        try:
            peaks = step.run().peaks
        except TrainingError as error:
            print(f"run {seed}: {error}")
            stuck += 1
            continue
        over += any(peak > total for peak, total in zip(peaks, step.totals, strict=True))
        full += any(peak == total for peak, total in zip(peaks, step.totals, strict=True))
    return {"runs": runs, "stuck": stuck, "over": over, "exactly full": full}


def footprints(workload: Workload) -> tuple[list[list[Chunks]], list[int]]:
    """Of a transformer stage per microbatch: as much as its forward takes long, in eight sizes."""
    lengths = [sum(row[j] for row in workload.forward) for j in range(workload.microbatches)]
    mean = sum(lengths) / len(lengths)
    buckets = [min(round(4 * length / mean), 7) for length in lengths]

    def chunk(stage: int, size: int) -> Footprint:
        message = KIB * max(size, 1)
        first, last = stage == 0, stage == workload.stages - 1
        return Footprint(
            activation_in_bytes=0 if first else message,
            activation_out_bytes=0 if last else message,
            gradient_in_bytes=0 if last else message,
            gradient_out_bytes=0 if first else message,
            held_after_forward_bytes=16 * message,
            held_after_input_bytes=10 * message,
        )

    return [[[chunk(stage, size)] for size in range(8)] for stage in range(workload.stages)], buckets


def step_times() -> list[dict[str, Any]]:
    """Per hint and factor: real and simulated step time over that without a limit, and the fullest stage."""
    workload = log_normal(STAGES, MICROBATCHES, forward=FORWARD_SECONDS, sigma=0.3, shared=0.5, seed=1)
    placement = Placement(STAGES)
    costs = WorkloadCosts(workload, placement)
    chunks, buckets = footprints(workload)
    plan = by_name("1f1b")
    orders = [plan.order(stage, placement, MICROBATCHES) for stage in range(STAGES)]  # type: ignore[union-attr]
    unit = max(order_peaks(orders, chunks, buckets))
    rows: list[dict[str, Any]] = []
    for name in HINTS:
        rules = StepRules(placement=placement, microbatches=MICROBATCHES, schedule=by_name(name))
        real: dict[float | None, float] = {}
        simulated: dict[float | None, float] = {}
        own: list[dict[str, Any]] = []
        for factor in (*FACTORS, None):
            room = None if factor is None else int(factor * unit)
            budgets = step_budgets([room] * STAGES, chunks, buckets, by_chunk=rules.charges_by_chunk)
            outcomes = [
                run(rules, chunks, buckets, budgets, lambda r: costs.duration(r.stage, r.task))
                for _ in range(STEPS)
            ]
            real[factor] = median(outcome.seconds for outcome in outcomes)
            simulated[factor] = simulate(rules, costs, budgets=budgets).makespan
            most = max(max(outcome.peaks) for outcome in outcomes)
            own.append({"schedule": name, "factor": factor, MOST: most / unit})
        for row in own:
            row["real"] = real[row["factor"]] / real[None]
            row["simulated"] = simulated[row["factor"]] / simulated[None]
        rows += own
    return rows


def main() -> int:
    """Explore, run, time, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="of the real driver (default: 1000)")
    parser.add_argument("--cases", type=int, default=1000, help="explored whole (default: 1000)")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", STAGES)
    small = explored(options.cases)
    print(f"explored whole: {small}", flush=True)
    random = random_runs(options.runs)
    print(f"random steps of the driver: {random}", flush=True)
    rows = step_times()
    for row in rows:
        limit = "unlimited" if row["factor"] is None else f"{row['factor']:g}x"
        print(
            f"{row['schedule']:4} {limit:9}  time over unlimited: real {row['real']:.3f}, simulated "
            f"{row['simulated']:.3f}; fullest stage: {row[MOST]:.2f} of 1F1B's bytes"
        )
    over = max((row[MOST] / row["factor"] for row in rows if row["factor"]), default=0.0)
    aims = [
        Aim("explored steps that exceed their bytes or stand still", small["broken"], 0, "cases"),
        Aim("runs that stand still", random["stuck"], 0, "runs"),
        Aim("runs that exceed their bytes", random["over"], 0, "runs"),
        Aim("fullest stage of the timed steps over its budget", over, 1.0, "of the budget"),
    ]
    return finish(options, {"explored": small, "random": random, "step_times": rows}, aims)


if __name__ == "__main__":
    sys.exit(main())
