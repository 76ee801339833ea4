"""One of the four processes that `benchmarks.runtime.overhead` starts; rank 0 writes what all of them found.

rrfp launch -n 4 -m benchmarks.runtime.overhead_rank FILE
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import median_and_p99
from benchmarks.paced_run import Pace, PacedRun
from benchmarks.runtime.host_cost import STAGES, WARMUP, Stopwatch, empty_pipeline, watched_steps
from configs import quickstart
from rrfp_jax.nixl.sender import Sender
from rrfp_jax.nixl.transport import NixlTransport
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.world import World
from rrfp_jax.trace.costs import constant
from rrfp_jax.trace.records import StepTrace

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
IDLE_SECONDS = 5.0
MICROBATCHES, STEPS, PICKUP_STEPS = 8, 6, 80


def paced_traces(message_bytes: int, seconds: float) -> list[StepTrace]:
    """Steps of four paced stages that differ only in the size of their messages; the first is left out."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(
            json.dumps(constant(STAGES, MICROBATCHES, seconds).as_json_object()), encoding="utf-8"
        )
        pace = Pace(workload=str(file), message_bytes=message_bytes)
    run = PacedRun(quickstart.get_config(), pace)
    return [report.trace for report in run.steps(STEPS)][1:]


def hops(traces: list[StepTrace]) -> list[float]:
    """Seconds from the end of a task to the moment the stage that it makes ready knows."""
    found = []
    for trace in traces:
        for record in trace.records:
            if (receiver := trace.receiver(record)) is not None:
                found.append(receiver.ready - record.end)
    return found


def pickups(world: World) -> list[float]:
    """Seconds from the moment that a task's input has been written to its dispatch, one microbatch at a time.

    The sender notes that moment. Nothing else runs meanwhile, so every task finds its device idle and every
    process asleep.
    """
    written: dict[tuple[int, Any], float] = {}
    complete = Sender.complete

    def observed(self: Sender, number: int) -> list[Any]:
        key = self._outgoing[number].key
        written[key.stage, key.input] = perf_counter() + world.clock[0]
        return complete(self, number)

    Sender.complete = observed  # type: ignore[method-assign]
    found = []
    for report in empty_pipeline(8, 1, width=512, transport="nixl").steps(PICKUP_STEPS):
        for record in report.trace.records if report.step >= WARMUP else ():
            if (at := written.get((record.stage, record.task.input))) is not None:
                found.append(record.dispatched - at)
        written.clear()
    Sender.complete = complete  # type: ignore[method-assign]
    return found


def idle_share(world: World) -> float:
    """Share of a core that a process takes while it waits for others."""
    world.gather("the start of idling", None)
    began, cpu = perf_counter(), time.process_time()
    if world.rank == 0:
        time.sleep(IDLE_SECONDS)
    world.gather("the end of idling", None)
    return (time.process_time() - cpu) / (perf_counter() - began)


def main(file: str) -> None:
    """Measure; all ranks do the same."""
    world = join()
    figures: dict[str, Any] = {"hop": {}}
    for name, size in SIZES.items():
        traces = paced_traces(size, 0.01 if size < 2**24 else 0.05)
        figures["hop"][name] = median_and_p99(hops(traces))
    times = world.gather("the pick-up times", pickups(world))
    figures["pickup"] = median_and_p99([seconds for own in times for seconds in own])
    shares = world.gather("the idle shares", idle_share(world))
    figures["idle_percent"] = [round(100 * share, 2) for share in shares]
    figures["host"] = []
    for leaves in (8, 30):
        trainer = empty_pipeline(leaves, MICROBATCHES, transport="nixl")
        watch = Stopwatch()
        watched_steps(trainer, watch, NixlTransport)
        samples = world.gather(f"the host times of {leaves} leaves", watch.samples)
        merged = {part: [s for own in samples for s in own[part]] for part in watch.samples}
        cost = {part: median_and_p99(seconds) for part, seconds in merged.items()}
        figures["host"].append({"leaves": leaves, **cost})
    if world.rank == 0:
        Path(file).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
