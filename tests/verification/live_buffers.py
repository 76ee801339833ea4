"""A step in which every device comes to rest before each task, and what is in memory then."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

import rrfp_jax as rrfp
from rrfp_jax.core.events import Dispatch, Event, Room
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.stages.memory import StageLedger
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.runtime.transport.protocol import Arrival, Devices, Key, LocalTransport
from rrfp_jax.trace.records import TaskRecord


@dataclass(frozen=True)
class InTurns(FixedOrder):
    """All F's, then all B's; or, split, all I's and then all W's. The first stage has no I."""

    split: bool

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """By kind, then by microbatch."""
        kinds: tuple[Kind, ...] = (FORWARD, BACKWARD)
        if self.split and stage > 0:
            kinds = FORWARD, INPUT, WEIGHT
        return [Task(kind, 0, j) for kind in kinds for j in range(microbatches)]


@dataclass(frozen=True)
class Moment:
    """A device at rest before a task (bytes)."""

    stage: int
    waits_for: str
    fixed: int
    of_microbatches: int
    of_all_stages: int
    live: int
    resident: int
    in_use: int | None


class Resting(LocalTransport):
    """Delivers before it goes on, so that nothing is under way when somebody looks."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices)
        self._delivered: list[Arrival] = []

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """See `Transport.offer`."""
        super().offer(key, arrays)
        jax.block_until_ready(arrays)
        super().produced(key, perf_counter())
        while not (arrivals := super().poll()):
            pass
        self._delivered += arrivals

    def produced(self, key: Key, at: float) -> None:
        """It has been waited for."""

    def poll(self) -> list[Arrival]:
        """See `Transport.poll`."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def seconds_until_poll(self) -> float | None:
        """See `Transport.seconds_until_poll`."""
        return 0.0 if self._delivered else None


def moments_of(trainer: rrfp.Trainer, ledgers: Sequence[StageLedger], count: int) -> list[Moment]:
    """A step of so many microbatches, looked at before every task."""
    gc.collect()  # of trainers that were here before
    found: list[Moment] = []
    driver, own_stages = trainer._engine.driver, trainer._engine.stages
    foreign = {
        s: buffers(stage.stage_mesh.device) - buffers_of_stage(stage, trainer._engine.optimizers)
        for s, stage in own_stages.items()
    }
    parts: Mapping[int, Any] = {}

    def look(stage: int, waits_for: str) -> None:
        """Let everything come to rest, and count."""
        for array in jax.live_arrays():
            array.block_until_ready()
        for queue in driver._queues:
            for running in queue._running:
                running.has_ended()  # lets go of its result
        (device,), bucket = driver.devices[stage], ledgers[stage].largest
        prepared = bucket.prepared_bytes + count * bucket.data_bytes
        parked = ledgers[stage].parked_gradient_bytes  # of which nothing is there at rest
        found.append(
            Moment(
                stage=stage,
                waits_for=waits_for,
                fixed=ledgers[stage].fixed_bytes - parked + prepared,
                of_microbatches=parts[stage].meter.now,
                of_all_stages=sum(part.meter.now for part in parts.values()),
                live=sum(size for _, size in buffers(device) - foreign[stage]),
                resident=resident_bytes(),
                in_use=(device.memory_stats() or {}).get("bytes_in_use"),
            )
        )

    class Inspected(StageScheduler):
        """Looks before it answers."""

        def handle(self, event: Event) -> Dispatch | None:
            """As it should."""
            if isinstance(event, Room) and not self.finished:
                look(self.stage, str(self.awaited()))
            return super().handle(event)

    def run(rules: StepRules, step: int, own: Mapping[int, Any], budgets: Any) -> list[TaskRecord]:
        nonlocal parts
        parts = own
        return Driver.run(driver, rules, step, own, budgets)

    driver.scheduler, driver.local, driver.run = Inspected, Resting(driver.devices), run  # type: ignore
    # Copies, since a device may share the host's memory, and equal arrays would be counted once.
    microbatches = list(trainer._own_data("step")._current) * count  # type: ignore[attr-defined]
    trainer.step([{name: np.copy(value) for name, value in mb.items()} for mb in microbatches])
    return found


def buffers(device: jax.Device) -> set[tuple[int, int]]:
    """Address and bytes of all live buffers on a device, each once."""
    return {_buffer(array) for array in jax.live_arrays() if array.device == device}


def buffers_of_stage(stage: Stage, optimizers: Sequence[Optimizer]) -> set[tuple[int, int]]:
    """The same of what a stage has between steps."""
    state = [own.state for own in optimizers if stage in own.stages]
    return set(map(_buffer, jax.tree.leaves((stage.leaves, state, stage.gradients, stage.loss_scale))))


def _buffer(array: jax.Array) -> tuple[int, int]:
    return array.unsafe_buffer_pointer(), array.nbytes


def resident_bytes() -> int:
    """Memory that the operating system has given this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
