"""What agreement costs where this machine cannot run it: tp = 16, and 1,024 processes on one store.

    python -m benchmarks.studies.store_scale [--json=FILE] [--check] [--from=FILE]

1. Messages are measured: calls of the key-value store by 1, 4 and 16 clients, and how long messages take by
   store and by socket.
2. `benchmarks.runtime.agreement` runs with tp = 4. The same is simulated (`benchmarks/studies/scale`) with
   what was measured, all processes and the store on this machine's processors: predicted beside measured.
3. Pipelines of four stages are simulated in which each process has a processor of its own, and the store has
   one: a pipeline with tp = 2 to 16, and 16 of them with tp = 16, which are 1,024 processes on one store.

`--from` takes what was measured from a file that an earlier run has written.

exposed    time in which some task could run by what has arrived, devices idle, and not all know what to run
longer     the step, than one that needs no agreement
full at    so many groups call the store as often as it can answer, if nothing slows them down
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Aim, finish, found_by_ranks, parse, percent_longer
from benchmarks.runtime import agreement
from benchmarks.runtime.agreement_rank import LIMIT, MICROBATCHES, SKEW, STAGES
from benchmarks.studies.scale.carriers import Socket, Store
from benchmarks.studies.scale.costs import MessageCosts
from benchmarks.studies.scale.groups import Grouped, MakeCarrier, simulate

PROCESSES, MEASURE_SECONDS = 8, 600.0
VALIDATED_TP, VALIDATED_MS = 4, "5,30"

STEPS, SEEDS = 4, 3
"""Steps that are simulated, the first left out; of the small ones with several seeds."""

SIZES = ((2, 1), (4, 1), (8, 1), (16, 1), (16, 16))
"""tp, and how many pipelines."""
PIPELINE = 4
LENGTHS_MS = (5.0, 10.0, 30.0, 100.0)

CARRIERS: Mapping[str, MakeCarrier] = {"socket": Socket, "kv": Store}
PROTOCOLS = ("leader", "unanimous")

CALLS_LIMIT, SHARE_LIMIT = 1.2, 3.0
"""By what factor, in the median over cells, predictions may be off: calls per task; share of the step."""


def main() -> int:
    """Measure, compare, simulate, print, write."""
    parser = parse(__doc__)
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="take measurements from here"
    )
    options = parser.parse_args()
    if options.source is not None:
        found = json.loads(options.source.read_text(encoding="utf-8"))["figures"]
        costs, cells = found["costs"], found["measured"]
    else:
        costs, cells = measured_costs(), agreement.measured(VALIDATED_TP, VALIDATED_MS)
    _show_costs(costs)
    driver = 1e-6 * median(cell["driver_us_per_task"] for cell in cells)
    print(f"a driver works {1e6 * driver:.0f} us per task")
    here = MessageCosts.of(costs, driver, shared=True)
    compared = [_compared(cell, here) for cell in cells]
    rows = []
    print("\n  tp  processes  task  carrier  protocol   exposed/task  longer  calls/task  full at")
    for row in scaled(MessageCosts.of(costs, driver, shared=False)):
        rows.append(row)
        print(_line(row), flush=True)
    figures = {"costs": costs, "measured": cells, "compared": compared, "scaled": rows}
    return finish(options, figures, _aims(compared))


def measured_costs() -> Any:
    """What `scale.measure` finds."""
    module, on_the_cpu = "benchmarks.studies.scale.measure", {"JAX_PLATFORMS": "cpu"}
    return found_by_ranks(PROCESSES, module, seconds=MEASURE_SECONDS, env=on_the_cpu)


def predicted(cell: Mapping[str, Any], costs: MessageCosts) -> dict[str, float]:
    """What a cell of `benchmarks.runtime.agreement` should have found."""
    seconds = cell["task_ms"] / 1000
    run = Grouped(
        stages=STAGES,
        tp=VALIDATED_TP,
        microbatches=MICROBATCHES,
        task_seconds=seconds,
        schedule=cell["schedule"],
        protocol=cell["protocol"],
        limit=LIMIT,
        skew=SKEW * seconds if cell["skewed"] else 0.0,
        held=False,  # as paced devices are
    )
    carrier = CARRIERS[cell["carrier"]]
    steps = [step for seed in range(SEEDS) for step in simulate(run, carrier, costs, seed, STEPS)[1:]]
    return {
        "exposed_percent": median(100 * max(step.exposed) / step.seconds for step in steps),
        "lead_ms": 1e3 * median(step.lead for step in steps),
        "store_calls_per_task": median(step.calls / step.tasks for step in steps),
    }


def scaled(costs: MessageCosts) -> Iterator[dict[str, Any]]:
    """All sizes, lengths, carriers and protocols."""
    for (tp, pipelines), task_ms in product(SIZES, LENGTHS_MS):
        size = {"stages": PIPELINE, "replicas": pipelines, "task_seconds": task_ms / 1000}
        apart = simulate(Grouped(tp=1, **size), Socket, costs, 0, STEPS)  # type: ignore[arg-type]
        alone = median(step.seconds for step in apart)
        for carrier, protocol in product(CARRIERS, PROTOCOLS):
            run = Grouped(tp=tp, protocol=protocol, **size)  # type: ignore[arg-type]
            seeds, count = (SEEDS, STEPS) if pipelines == 1 else (1, 2)
            made = (simulate(run, CARRIERS[carrier], costs, seed, count) for seed in range(seeds))
            steps = [step for own in made for step in own[1:]]
            tasks, calls = steps[0].tasks, median(step.calls for step in steps)
            yield {
                "tp": tp,
                "processes": tp * run.groups,
                "task_ms": task_ms,
                "carrier": carrier,
                "protocol": protocol,
                "exposed_ms_per_task": median(1e3 * sum(step.exposed) / tasks for step in steps),
                "longer_percent": percent_longer(median(step.seconds for step in steps), alone),
                "calls_per_task": calls / tasks,
                "full_at_groups": costs.calls_per_second * alone * run.groups / calls if calls else None,
            }


def _compared(cell: Mapping[str, Any], costs: MessageCosts) -> dict[str, Any]:
    found = predicted(cell, costs)
    skew = "yes" if cell["skewed"] else "no "
    print(
        f"{cell['task_ms']:3.0f} ms  skew {skew}  {cell['schedule']:3}  {cell['carrier']:6}  "
        f"{cell['protocol']:9}  of the step {cell['exposed_percent']:6.2f} % predicted "
        f"{found['exposed_percent']:6.2f} %  ahead {cell['lead_ms']:5.1f} ms predicted "
        f"{found['lead_ms']:5.1f}  calls/task {cell['store_calls_per_task']:4.1f} predicted "
        f"{found['store_calls_per_task']:4.1f}",
        flush=True,
    )
    return {**cell, "predicted": found}


def _show_costs(costs: Mapping[str, Any]) -> None:
    for kind, by_clients in costs["calls"].items():
        for clients, found in by_clients.items():
            print(
                f"{kind:6}  {clients:>2} clients: {found['median_us']:6.0f} us (p99 {found['p99_us']:6.0f}), "
                f"{found['per_second']:6.0f} calls/s; of a processor {found['server_cpu_us']:4.0f} us of the "
                f"server and {found['client_cpu_us']:4.0f} us of the client per call"
            )
    for name, ways in costs["ways"].items():
        ordered = sorted(ways)
        nine = ordered[len(ordered) * 9 // 10]
        print(f"the way of a message, {name}: {1e3 * median(ways):.2f} ms, nine of ten {1e3 * nine:.2f} ms")
    print(f"load average of the machine: {costs['load']:.1f}", flush=True)


def _line(row: Mapping[str, Any]) -> str:
    full = "" if row["full_at_groups"] is None else f"{row['full_at_groups']:.0f} groups"
    return (
        f"{row['tp']:4}  {row['processes']:9}  {row['task_ms']:4.0f}  {row['carrier']:7}  "
        f"{row['protocol']:9}  {row['exposed_ms_per_task']:9.2f} ms  {row['longer_percent']:5.1f} %  "
        f"{row['calls_per_task']:10.1f}  {full}"
    )


def _aims(compared: Sequence[Mapping[str, Any]]) -> list[Aim]:
    """How far off predictions are: the median factor over cells, whichever of the two is larger."""
    calls = _factors([cell for cell in compared if cell["carrier"] == "kv"], "store_calls_per_task")
    shares = _factors(compared, "exposed_percent")
    return [
        Aim("predicted calls per task are off by a factor of", median(calls), CALLS_LIMIT, ""),
        Aim("predicted shares of the step are off by a factor of", median(shares), SHARE_LIMIT, ""),
    ]


def _factors(compared: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    pairs = [(cell[name], cell["predicted"][name]) for cell in compared]
    return [max(one, other) / max(min(one, other), 1e-9) for one, other in pairs]


if __name__ == "__main__":
    sys.exit(main())
