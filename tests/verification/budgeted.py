"""Steps of the real driver under byte budgets: devices are paced, and stages hold nothing but messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np

from benchmarks.paced_queue import PacedQueue
from rrfp_jax.core.footprint import Chunks, least_room, step_budgets
from rrfp_jax.core.hints import BF, BFW, BPriority, FPriority, Ranked
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import FORWARD, WEIGHT, Placement, Task
from rrfp_jax.runtime.engine.device import Running
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.pacing import ArrivalDelays
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.step import Meter
from rrfp_jax.trace.records import TaskRecord
from tests.verification.exploration.cases import schedules
from tests.verification.exploration.memory import footprints_of

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
