"""Part 4: the host beside the device: what a task costs it, and how far ahead of it the device must be fed.

host_per_task   microseconds of the driver per task, by part, as `benchmarks.runtime.overhead` has them, of
                four stages that share the device; `bare`: the same programs in a plain loop
wake            from the moment a program's end can be seen by looking to the moment a sleeping thread
                that waited for it runs
lead            steps of tasks of several lengths, for several values of the room rule's lead, against a
                plain loop that dispatches the same programs without ever waiting: the shortest task that
                loses nothing (1 %) to it, and of each length the smallest lead as good (1 %) as the best
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.work import Busy, milliseconds, seconds_until_ready
from benchmarks.host import STAGES, empty_microbatches, empty_pipeline, host_cost, load_stages, run_plainly
from rrfp_jax.runtime.engine.device import LEAD_SECONDS, DeviceQueue
from rrfp_jax.runtime.engine.loop import Driver

WIDTHS, QUICK_WIDTHS = (1024, 2048, 4096, 8192), (32, 128)
LEADS, QUICK_LEADS = (0.0, 1e-4, 2e-4, 5e-4, LEAD_SECONDS, 2e-3, 5e-3, 1.0), (0.0, LEAD_SECONDS)
LEAVES, MICROBATCHES = 2, 8
TOLERANCE = 1.01
RESERVE_SECONDS = 12.0
"""A width is not begun with less time left than this."""


def wake(rounds: int, quick: bool) -> dict[str, Any]:
    """Seconds until the end of a short program is seen, by looking and by a thread that sleeps on it."""
    busy = Busy.calibrated(256, jnp.float32) if quick else Busy.calibrated(8192, jnp.bfloat16)
    program = busy.program(0.005)
    jax.block_until_ready(program(busy.matrix))
    woken = threading.Event()
    late = []
    for _ in range(rounds):
        array = program(busy.matrix)
        began = perf_counter()
        (looked,) = seconds_until_ready(began, array)
        array = program(busy.matrix)
        began = perf_counter()
        woken.clear()
        waiter = threading.Thread(target=_ring_when_ready, args=(array, woken))
        waiter.start()
        woken.wait()
        late.append(perf_counter() - began - looked)
        waiter.join()
    return {"later_than_looking_us": round(1e6 * float(np.median(late)), 1)}


def _ring_when_ready(array: jax.Array, woken: threading.Event) -> None:
    array.block_until_ready()
    woken.set()


class Tasks:
    """A pipeline of four stages on one device whose tasks are as long as a width makes them."""

    def __init__(self, width: int, rounds: int) -> None:
        self._rounds = rounds
        self._trainer = empty_pipeline(LEAVES, MICROBATCHES, width, share_devices=True)
        self._data = empty_microbatches(MICROBATCHES, width)
        self._step_seconds(1)

    def plain_seconds(self) -> float:
        """Median seconds of a step's tasks in the plain loop."""
        samples = []
        for _ in range(self._rounds + 1):
            parts = load_stages(self._trainer, self._data)
            jax.block_until_ready([part.stage.gradients for part in parts])
            began = perf_counter()
            jax.block_until_ready(run_plainly(parts))
            samples.append(perf_counter() - began)
        return float(np.median(samples[1:]))

    def step_seconds(self, lead: float) -> float:
        """Median seconds of a step's tasks in the driver with this lead (s)."""
        engine = self._trainer._engine
        engine.driver = Driver(
            engine.layout.devices,
            engine.world,
            queue=lambda name, ring: DeviceQueue(name, ring, lead),
        )
        self._step_seconds(2)  # until durations are known
        return self._step_seconds(self._rounds)

    def _step_seconds(self, steps: int) -> float:
        reports = [self._trainer.step(self._data) for _ in range(steps)]
        return float(np.median([report.step_seconds for report in reports]))


def sweep(
    found: Findings, widths: Sequence[int], leads: Sequence[float], rounds: int
) -> list[dict[str, Any]]:
    """For every width: seconds a task in the plain loop, and steps over the plain loop's by lead."""
    rows = []
    for width in widths:
        if found.seconds_left < RESERVE_SECONDS and not found.quick:
            found.too_late(f"tasks of width {width}")
            continue
        tasks = Tasks(width, rounds)
        before = tasks.plain_seconds()
        steps = {lead: tasks.step_seconds(lead) for lead in leads}
        plain = min(before, tasks.plain_seconds())
        rows.append(
            {
                "width": width,
                "task_us": round(1e6 * plain / (2 * STAGES * MICROBATCHES), 1),
                "over_plain_loop": {f"{1e3 * lead:g} ms": round(s / plain, 4) for lead, s in steps.items()},
                "best_lead_ms": milliseconds(smallest_as_good_as_best(steps)),
            }
        )
    return rows


def smallest_as_good_as_best(seconds: dict[float, float]) -> float:
    """The smallest key whose value is within 1 % of the smallest value."""
    best = min(seconds.values())
    return min(key for key, value in seconds.items() if value <= TOLERANCE * best)


def shortest_without_loss(rows: Sequence[dict[str, Any]], lead: str) -> float | None:
    """The shortest task (us) from which on all longer ones take at most 1 % longer than the plain loop."""
    shortest = None
    for row in sorted(rows, key=lambda row: row["task_us"], reverse=True):
        if row["over_plain_loop"][lead] > TOLERANCE:
            break
        shortest = float(row["task_us"])
    return shortest


def measure(found: Findings) -> None:
    """See the module's text."""
    quick = found.quick
    with found.section("host_per_task") as figures:
        for leaves in (8,) if quick else (8, 30):
            figures[f"{leaves} leaves"] = host_cost(leaves, 8, share_devices=True, steps=5 if quick else 40)
        found.headline = f"{figures['8 leaves']['all']['median_us']:.0f} us of the host per task of 8 leaves"
    with found.section("wake") as figures:
        figures.update(wake(5 if quick else 50, quick))
    with found.section("lead") as figures:
        widths, leads = (QUICK_WIDTHS, QUICK_LEADS) if quick else (WIDTHS, LEADS)
        figures["rows"] = rows = sweep(found, widths, leads, 2 if quick else 7)
        usual = f"{1e3 * LEAD_SECONDS:g} ms"
        figures["shortest_task_without_loss_us"] = shortest = shortest_without_loss(rows, usual)
        loses = "all tasks tried wait" if shortest is None else f"tasks of less than {shortest} us wait"
        leads_found = ", ".join(f"{row['best_lead_ms']} ms at {row['task_us']} us" for row in rows)
        found.headline += f"; {loses} for the host; best lead {leads_found}"
