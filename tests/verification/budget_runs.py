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

import sys
from statistics import median
from typing import Any

import jax

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.core.footprint import Chunks, Footprint, order_peaks, step_budgets
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import TrainingError
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts, log_normal
from tests.verification.budgeted import drawn, run
from tests.verification.exploration import memory
from tests.verification.exploration.space import Violation, explore

STAGES, MICROBATCHES = 4, 32
FORWARD_SECONDS = 0.01
FACTORS = (1.0, 1.5, 2.0, 4.0)
HINTS = ("bf", "bfw")
STEPS = 5
KIB = 1024
MOST = "most_of_1f1b_bytes"


def explored(cases: int) -> dict[str, int]:
    """Random small steps, all of their states; how many broke a rule."""
    states, broken = 0, 0
    for seed in range(cases):
        try:
            states += explore(memory.drawn(seed)).states
        except Violation as violation:
            print(f"case {seed}: {violation}")
            broken += 1
    return {"cases": cases, "states": states, "broken": broken}


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
