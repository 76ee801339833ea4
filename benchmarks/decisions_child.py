"""What a decision costs by schedule, as JSON: `python decisions_child.py NAME...`, run by `speed.py`.

Reads nothing of the benchmarks, and finds modules by the names that they had in an earlier layout, too, so
that the core of another revision can be measured.
"""

import gc
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from time import process_time
from typing import Any

STAGES, MICROBATCHES, LIMIT, REPEATS = 8, 32, 8, 15


def found(*names: str) -> Any:
    """The first of some modules of `rrfp_jax` that is there."""
    for name in names[:-1]:
        try:
            return import_module(f"rrfp_jax.{name}")
        except ImportError:
            continue
    return import_module(f"rrfp_jax.{names[-1]}")


def told(rules: Any, costs: Any) -> tuple[list[list[Any]], int]:
    """What each stage's scheduler is told in a simulated step, and how many tasks there are."""
    device: Any = found("sim.device", "sim.engine")
    scheduler: Any = found("core.scheduler").StageScheduler
    events: list[list[Any]] = [[] for _ in range(STAGES)]

    class Recording(scheduler):  # type: ignore[misc]
        def handle(self, event: Any) -> Any:
            events[self.stage].append(event)
            return super().handle(event)

    device.StageScheduler = Recording
    try:
        trace = found("sim.engine").simulate(rules, costs)
    finally:
        device.StageScheduler = scheduler
    return events, len(trace.records)


def seconds(rules: Any, events: Sequence[Sequence[Any]]) -> float:
    """CPU time of the core alone, for all of a step's events."""
    total = 0.0
    for stage, own in enumerate(events):
        handle = found("core.scheduler").StageScheduler(stage, rules).handle
        began = process_time()
        for event in own:
            handle(event)
        total += process_time() - began
    return total


def main(names: Sequence[str]) -> None:
    """Print microseconds a task by name, the least of several times, all in turns."""
    workload = found("trace.costs", "core.measure.workload", "core.workload").log_normal(
        STAGES, MICROBATCHES, forward=0.01, sigma=0.3, shared=0.5, seed=0, transfer=0.001
    )
    placement = found("core.tasks").Placement(STAGES, 2, "v")
    costs = found("trace.costs", "core.measure.costs", "core.costs").WorkloadCosts(workload, placement)
    cases = {}
    for name in names:
        rules = found("core.step_rules", "core.rules").StepRules(
            placement=placement,
            microbatches=MICROBATCHES,
            schedule=found("core.schedules").by_name(name),
            limit=LIMIT,
        )
        cases[name] = rules, *told(rules, costs)
    gc.disable()
    least = dict.fromkeys(names, float("inf"))
    for _ in range(REPEATS):
        for name, (rules, events, tasks) in cases.items():
            least[name] = min(least[name], 1e6 * seconds(rules, events) / tasks)
    print(json.dumps(least))


if __name__ == "__main__":
    main(sys.argv[1:])
