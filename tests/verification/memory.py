"""The ledger against what is really there: live buffers, and the memory of the process.

    python -m tests.verification.memory [--json=FILE] [--check] [--quick]

A GPT on two stages runs all forwards of a step, then all backwards (fused, or all I's and then all W's), with
1 to 16 microbatches in flight, its blocks rematerialised or not. Before every task the devices are let come
to rest, and live buffers are counted, each pointer once, beside what the runtime says of that moment. Then
with at least 1 GiB in flight, in a process of its own, the memory that the operating system has given it. On
a GPU also what `memory_stats()` says.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.harness import Aim, finish, output_of, parse
from models import gpt
from rrfp_jax.core.events import Dispatch, Event, Room
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.programs.stage_programs import Row, TaskProgram
from rrfp_jax.runtime.sizes import nbytes, temporary_bytes
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
    """A device at some moment of a step (bytes); `numbers` nobody counts: losses, scales, tokens."""

    stage: int
    waits_for: str
    fixed: int
    of_microbatches: int
    of_all_stages: int
    live: int
    numbers: int
    temporary: int  # of the program that runs, as its compiler says
    resident: int
    in_use: int | None

    @property
    def found(self) -> int:
        """What is there for microbatches, by the live buffers and the compiler."""
        return self.live - self.fixed - self.numbers + self.temporary


class Resting(LocalTransport):
    """Delivers before it goes on, so that nothing is under way when somebody looks, but for `sending`."""

    def __init__(self, devices: Devices, sending: Callable[[], None]) -> None:
        super().__init__(devices)
        self._delivered: list[Arrival] = []
        self._sending = sending

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """See `Transport.offer`."""
        super().offer(key, arrays)
        jax.block_until_ready(arrays)
        self._sending()
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


@dataclass(frozen=True)
class WatchedRow:
    """The programs of a task; each is `seen` before the row lets go of what it took.

    `numbers` are the values of the row that no footprint counts; `seen` is told how many bytes are there.
    """

    row: Row
    numbers: Collection[int]
    seen: Callable[[Any, int], None]

    @classmethod
    def of(cls, how: TaskProgram, seen: Callable[[Any, int], None]) -> TaskProgram:
        """A task's programs, to be seen; its statistics are a number."""
        if how.program is None:
            return how
        statistics = how.program.gives[how.sends :][: how.statistics is not None]
        own = {*how.program.tokens} - {*how.program.gives} | {*statistics}
        return replace(how, program=cls(how.program, own, seen))  # type: ignore[arg-type]

    def __call__(self, *given: Any) -> Any:
        """As the row."""
        there, numbers = len(given), 0

        def call(program: Any, *args: Any) -> Any:
            nonlocal there, numbers
            made = program(*args)
            numbers += sum(array.nbytes for i, array in enumerate(made, there) if i in self.numbers)
            there += len(made)
            self.seen(program, numbers)
            return made

        calls = [own._replace(program=partial(call, own.program)) for own in self.row.calls]
        return replace(self.row, calls=calls)(*given)


class Inspection:
    """Looks at a step of a trainer's microbatches, so many times each."""

    def __init__(self, trainer: rrfp.Trainer, ledgers: Sequence[StageLedger], count: int = 1) -> None:
        gc.collect()  # of trainers that were here before
        self._driver, self._ledgers = trainer._engine.driver, ledgers
        self._foreign = {
            s: buffers(stage.stage_mesh.device) - buffers_of_stage(stage, trainer._engine.optimizers)
            for s, stage in trainer._engine.stages.items()
        }
        # Copies, since a device may share the host's memory, and equal arrays would be counted once.
        own = list(trainer._own_data("step")._current) * count  # type: ignore[attr-defined]
        self._microbatches = [{name: np.copy(value) for name, value in mb.items()} for mb in own]
        self.at_rest: list[Moment] = []  # before every task
        self.under_way: list[Moment] = []  # with what programs take and give, or messages
        self._parts: Mapping[int, Any] = {}
        self._running = 0  # the stage whose task was dispatched last
        self._tokens = 0  # bytes of what tells that it has ended, until it is delivered
        driver = self._driver
        before = driver.scheduler, driver.local
        driver.scheduler, driver.local = self._scheduler, Resting(driver.devices, self._sending)
        driver.run = self._run  # type: ignore[assignment]
        try:
            self.report = trainer.step(self._microbatches)
        finally:
            driver.scheduler, driver.local = before
            del driver.run

    def look(self, stage: int, waits_for: str, numbers: int = 0, temporary: int = 0) -> Moment:
        """Let everything come to rest, and count."""
        for array in jax.live_arrays():
            array.block_until_ready()
        for queue in self._driver._queues:
            for running in queue.flights:
                running.has_ended()  # lets go of its result
        (device,), ledger, part = self._driver.devices[stage], self._ledgers[stage], self._parts[stage]
        bucket = ledger.largest
        prepared = bucket.prepared_bytes + len(self._microbatches) * bucket.data_bytes
        # Of the gradients that may be parked nothing is there at rest.
        return Moment(
            stage=stage,
            waits_for=waits_for,
            fixed=ledger.fixed_bytes - ledger.parked_gradient_bytes + prepared,
            of_microbatches=part.meter.now,
            of_all_stages=sum(other.meter.now for other in self._parts.values()),
            live=sum(size for _, size in buffers(device) - self._foreign[stage]),
            numbers=numbers + nbytes([part.stage.loss_scale, *part.statistics.values()]),
            temporary=temporary,
            resident=resident_bytes(),
            in_use=(device.memory_stats() or {}).get("bytes_in_use"),
        )

    def seen(self, program: Any, numbers: int) -> None:
        """A program has ended, and what it took is still there."""
        self._tokens = numbers
        self.under_way.append(self.look(self._running, "its end", numbers, temporary_bytes(program)))

    def _sending(self) -> None:
        for stage in self._parts:
            numbers = self._tokens if stage == self._running else 0
            self.under_way.append(self.look(stage, "a delivery", numbers))

    def _scheduler(self, *given: Any) -> StageScheduler:
        inspection = self

        class Looking(StageScheduler):
            """Looks before it answers."""

            def handle(self, event: Event) -> Dispatch | None:
                """As it should."""
                if isinstance(event, Room) and not self.finished:
                    inspection.at_rest.append(inspection.look(self.stage, str(self.awaited())))
                    inspection._running = self.stage
                return super().handle(event)

        return Looking(*given)

    def _run(self, rules: StepRules, step: int, own: Mapping[int, Any], *more: Any) -> list[TaskRecord]:
        self._parts = own
        for part in own.values():
            for key, (how, head) in part._bound.items():
                part._bound[key] = WatchedRow.of(how, self.seen), head
        return Driver.run(self._driver, rules, step, own, *more)


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


STAGES = 2
IN_FLIGHT = (1, 2, 4, 8, 16)
WIDTH, LENGTH, BATCH = 64, 64, 4
PAYLOAD = 2**30
LARGE_BATCH = 256
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Has the C library give freed memory back at once, so that what a process has is what it uses."""
RUN_SECONDS = 600.0
AIMS = {
    "live_off_percent": ("ledger and count off live buffers", 5.0),
    "in_flight_off_percent": ("the part of those in flight", 5.0),
    "growth_off_percent": ("growth per microbatch off what the ledger says is held", 5.0),
    "in_use_off_percent": ("growth off what the device says", 5.0),
    "resident_off_percent": ("growth of resident memory off the count", 20.0),
}
"""By figure: what it is, and its limit in percent."""


def trainer_of(split: bool, remat: bool, batch: int = BATCH) -> rrfp.Trainer:
    """Two stages with a block each, and data of one microbatch."""
    cfg = gpt.GPTConfig(d_model=WIDTH, n_heads=4, d_ff=3 * WIDTH, n_layers=STAGES)
    blocks = rrfp.layer(gpt.Block, cfg, repeat=STAGES)
    layers = [rrfp.layer(gpt.Embed, cfg), blocks, rrfp.layer(gpt.Head, cfg)]

    def loss(logits: jax.Array, mb: Any) -> rrfp.Loss:
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
        return rrfp.Loss(nll.sum(), weight=nll.size)

    tokens = np.zeros((batch, LENGTH), np.int32)
    return rrfp.Trainer(
        rrfp.Pipeline(layers, loss),
        optax.adamw(1e-3),
        data=[{"tokens": tokens, "labels": tokens}],
        mesh=rrfp.Mesh(pp=STAGES),
        schedule=InTurns(split),
        remat="full" if remat else "none",
    )


def measure(split: bool, remat: bool) -> dict[str, Any]:
    """How far ledger and count are off what is live, in the worst moment, and growth per microbatch."""
    trainer = trainer_of(split, remat)
    ledgers = trainer.start()
    worst = worst_in_flight = 0.0
    before_backward: dict[int, int] = {}
    for count in IN_FLIGHT:
        moments = Inspection(trainer, ledgers, count).at_rest
        for moment in moments:
            counted = moment.fixed + moment.of_microbatches
            worst = max(worst, abs(moment.live - counted) / moment.live)
        fullest = max(moments, key=lambda moment: moment.of_microbatches)
        in_flight = fullest.live - fullest.fixed
        worst_in_flight = max(worst_in_flight, abs(in_flight - fullest.of_microbatches) / in_flight)
        last = [m for m in moments if m.stage == STAGES - 1 and m.waits_for.startswith(("B0", "I0"))]
        before_backward[count] = min(m.live for m in last)
    bucket = ledgers[-1].largest
    growth = (before_backward[IN_FLIGHT[-1]] - before_backward[IN_FLIGHT[0]]) / (IN_FLIGHT[-1] - IN_FLIGHT[0])
    held = bucket.held_bytes + bucket.data_bytes
    found = {} if fullest.in_use is None else _off_in_use(moments, fullest)
    return found | {
        "live_off_percent": 100 * worst,
        "in_flight_off_percent": 100 * worst_in_flight,
        "growth_bytes": growth,
        "held_bytes": held,
        "growth_off_percent": 100 * abs(growth - held) / held,
        "weight_bytes": ledgers[-1].weight_bytes,
    }


def _off_in_use(moments: Sequence[Moment], fullest: Moment) -> dict[str, float]:
    """By how much the device's own account grows otherwise than the runtime's, up to the fullest moment."""
    first = next(moment for moment in moments if moment.stage == fullest.stage)
    assert fullest.in_use is not None and first.in_use is not None
    counted = fullest.of_microbatches - first.of_microbatches
    return {"in_use_off_percent": 100 * abs(fullest.in_use - first.in_use - counted) / counted}


def measure_resident(split: bool, remat: bool) -> dict[str, Any]:
    """By how much the process grows from the step's beginning to its fullest moment, and the count."""
    trainer = trainer_of(split, remat, LARGE_BATCH)
    ledgers = trainer.start()
    count = -(-PAYLOAD // sum(ledger.largest.held_bytes for ledger in ledgers))
    moments = Inspection(trainer, ledgers, count).at_rest
    fullest = max(moments, key=lambda moment: moment.of_all_stages)
    counted = fullest.of_all_stages
    grown = fullest.resident - moments[0].resident
    return {
        "resident_in_flight": count,
        "resident_counted_bytes": counted,
        "resident_grown_bytes": grown,
        "resident_off_percent": 100 * abs(grown - counted) / counted,
    }


def in_process_of_its_own(split: bool, remat: bool) -> dict[str, Any]:
    """`measure_resident` in a fresh process."""
    command = [sys.executable, "-m", "tests.verification.memory", f"--resident={int(split)}{int(remat)}"]
    found: dict[str, Any] = json.loads(output_of(command, RUN_SECONDS, RETURNED).splitlines()[-1])
    return found


def main() -> int:
    """Look, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="no resident memory")
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", STAGES)
    if options.resident:
        print(json.dumps(measure_resident(*(flag == "1" for flag in options.resident))))
        return 0
    rows, aims = [], []
    for split, remat in product((False, True), (False, True)):
        name = f"{'split' if split else 'fused'}, remat {'full' if remat else 'none'}"
        row = {"case": name} | measure(split, remat)
        if not options.quick:
            row |= in_process_of_its_own(split, remat)
        rows.append(row)
        print(name, *(f"  {key}: {value:,.7g}" for key, value in row.items() if key != "case"), sep="\n")
        aims += [
            Aim(f"{name}: {what}", row[key], limit, "%") for key, (what, limit) in AIMS.items() if key in row
        ]
    if jax.devices()[0].platform == "cpu":
        print("memory_stats: not run on a GPU")
    return finish(options, {"rows": rows}, aims)


if __name__ == "__main__":
    sys.exit(main())
