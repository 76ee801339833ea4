"""What the runtime costs the host per task, and what one stage loses to a hand-written loop.

    python -m benchmarks.runtime.overhead [--json=FILE] [--check]

Part 1: an empty pipeline (tiny compute), 4 stages on 4 devices of this process; the time between two
dispatches in which the driver works is split into scheduling (the core), dispatch (calling programs) and
transfer (offer, pull, poll); `all` adds the driver's own loop. Sleeping is not counted. `bare` is what
the same programs cost per task when a plain loop calls them, stage after stage, with nothing around them: the
part that is JAX's and this machine's.
Part 2: four processes, one stage each: a hop (from the end of a task to the moment the stage that it makes
ready knows) by message size on paced devices, the time from the end of a message's write to dispatch on an
idle device, the CPU share of a process that waits, and the host time per task as in part 1.
Part 3: the tax of a one-stage pipeline, see `benchmarks/runtime/tax.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import rrfp_jax as rrfp
from benchmarks.harness import Aim, finish, found_by_ranks, parse
from benchmarks.runtime.host_cost import STAGES, host_cost
from benchmarks.runtime.tax import Tax, TaxCase
from models import gpt

RUN_SECONDS = 600.0
TAX = TaxCase(
    model=gpt.GPTConfig(d_model=128, n_heads=4, d_ff=344, n_layers=4),
    microbatches=8,
    batch=4,
    length=128,
    mesh=rrfp.Mesh(pp=1),
)


def show_processes(found: dict[str, Any]) -> list[Aim]:
    """Print the figures of four processes; their aims."""
    for name, hop in found["hop"].items():
        print(f"4 processes, hop of {name:>6}: {hop['median_us']:8.0f} us (p99 {hop['p99_us']:.0f})")
    pickup, idle = found["pickup"], max(found["idle_percent"])
    print(f"4 processes, ready to dispatched: {pickup['median_us']:.0f} us (p99 {pickup['p99_us']:.0f})")
    print(f"4 processes, CPU of an idle process: {idle:.2f} % of a core")
    for cost in found["host"]:
        parts = {name: cost[name] for name in ("scheduling", "dispatch", "transfer", "all")}
        text = "  ".join(f"{k} {v['median_us']:.1f} (p99 {v['p99_us']:.1f})" for k, v in parts.items())
        print(f"4 processes, {cost['leaves']:3} leaves, us per task: {text}")
    return [
        Aim("4 processes, ready to dispatched, median", pickup["median_us"], 100, "us"),
        Aim("4 processes, ready to dispatched, p99", pickup["p99_us"], 300, "us"),
        Aim("4 processes, CPU of an idle process", idle, 3, "%"),
    ]


def main() -> int:
    """Measure, print, write."""
    options = parse(__doc__).parse_args()
    figures: dict[str, Any] = {"host": [], "tax": {}}
    aims = []
    for leaves in (8, 30, 200):
        for microbatches in (8, 32):
            cost = host_cost(leaves, microbatches)
            figures["host"].append({"leaves": leaves, "microbatches": microbatches, **cost})
            text = "  ".join(f"{k} {v['median_us']:6.1f} (p99 {v['p99_us']:7.1f})" for k, v in cost.items())
            print(f"{leaves:4} leaves, {microbatches:3} microbatches, us per task: {text}", flush=True)
            label = f"{leaves} leaves, {microbatches} microbatches"
            aims.append(Aim(f"scheduling, {label}", cost["scheduling"]["median_us"], 20, "us"))
            if leaves <= 30:
                over = cost["all"]["median_us"] / cost["bare"]["median_us"]
                aims.append(Aim(f"all over bare, {label}", over, 1.5, "times"))
    figures["processes"] = found_by_ranks(STAGES, "benchmarks.runtime.overhead_rank", seconds=RUN_SECONDS)
    aims += show_processes(figures["processes"])
    figures["tax"] = Tax(TAX).measure()
    print("one stage, seconds a step:", {k: round(v, 4) for k, v in figures["tax"].items()})
    aims.append(Aim("tax of one stage", figures["tax"]["tax_percent"], 2, "%"))
    return finish(options, figures, aims)


if __name__ == "__main__":
    sys.exit(main())
