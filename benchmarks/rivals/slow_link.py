"""A slow link in the middle: readiness first beside PipeMorph's rule, an order adapted to measured delays.

    python -m benchmarks.rivals.slow_link [--json=FILE] [--check] [--write] [--seeds=4]

Simulated: 8 stages, 32 microbatches, forwards of 10 ms and backwards of 20, half of that I, half W;
log-normal, sd 0.02 or 0.3, half of the variance common to all tasks of a microbatch. Links take 1 ms; the
middle one, there and back, as long as the case says, in every step or in some of 9. The rule (`slackness.py`)
knows the means of the step before. Hints know nothing. Figures are mean step times over all steps but the
first and all seeds, over those of 1F1B; nobody holds more microbatches than the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean

from benchmarks.harness import RESULTS, Aim, finish, parse, put_figures, table
from benchmarks.rivals.slackness import adapted, measured
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import Workload, WorkloadCosts, log_normal

PAGE = RESULTS / "rivals.md"

STAGES, MICROBATCHES, FORWARD, LINK = 8, 32, 0.010, 0.001
SPREADS = (0.02, 0.3)
DELAYS: Mapping[str, Sequence[float]] = {
    "1 ms": (LINK,) * 9,
    "30 ms": (0.030,) * 9,
    "60 ms": (0.060,) * 9,
    "30 ms, every other 2 steps": (LINK, LINK, 0.030, 0.030) * 2 + (LINK,),
    "30 ms, every other step": (LINK, 0.030) * 4 + (LINK,),
}
"""Of the middle link, step by step; 30 and 60 ms against forwards of 10 are what PipeMorph injects."""

REFERENCE, RULE = "1f1b", "pipemorph's rule"
HINTS = ("bf", "bfw", "ranked:zb-v", "ranked:zb-h2")
FIXED = ("zb-v",)
"""Within any limit that 1F1B keeps."""


def workload(spread: float, delay: float, seed: int) -> Workload:
    """One step."""
    own = {"forward": FORWARD, "sigma": spread, "shared": 0.5, "transfer": LINK}
    drawn = log_normal(STAGES, MICROBATCHES, seed=seed, **own)  # type: ignore[arg-type]
    middle, slow = (STAGES - 1) // 2, (delay,) * MICROBATCHES
    forward, backward = list(drawn.transfer_forward), list(drawn.transfer_backward)
    forward[middle] = backward[middle + 1] = slow
    return replace(drawn, transfer_forward=tuple(forward), transfer_backward=tuple(backward))


def seconds(schedule: Schedule, step: Workload, limit: int) -> float:
    """What a step takes."""
    placement = schedule.placement_for(STAGES)
    rules = StepRules(placement=placement, microbatches=MICROBATCHES, schedule=schedule, limit=limit)
    return simulate(rules, WorkloadCosts(step, placement)).makespan


def of_a_step(before: Workload, step: Workload, limit: int) -> dict[str, float]:
    """What everybody takes for a step after another one."""
    named = {name: by_name(name) for name in (REFERENCE, *FIXED, *HINTS)}
    return {name: seconds(own, step, limit) for name, own in named.items()} | {
        RULE: seconds(adapted(measured(before), limit), step, limit)
    }


@dataclass(frozen=True)
class Cell:
    """One case at one limit.

    Attributes:
        times: mean step time over that of 1F1B, by schedule.
    """

    spread: float
    delay: str
    limit: int
    times: Mapping[str, float]

    @property
    def best(self) -> str:
        """The fastest of the hints."""
        return min(HINTS, key=self.times.__getitem__)

    @property
    def behind(self) -> float:
        """How many times as long as by the rule the best hint takes."""
        return self.times[self.best] / self.times[RULE]


def cells(seeds: int) -> Iterator[Cell]:
    """All cases."""
    for spread in SPREADS:
        for name, delays in DELAYS.items():
            runs = [
                [workload(spread, delay, 100 * seed + i) for i, delay in enumerate(delays)]
                for seed in range(seeds)
            ]
            for limit in (STAGES, MICROBATCHES):
                found = [of_a_step(*pair, limit) for run in runs for pair in pairwise(run)]
                means = {schedule: fmean(step[schedule] for step in found) for schedule in found[0]}
                yield Cell(spread, name, limit, {k: v / means[REFERENCE] for k, v in means.items()})


def markdown(found: Sequence[Cell]) -> str:
    """All cases."""
    names = (RULE, *FIXED, *HINTS)
    rows = []
    for cell in found:
        times = [f"{cell.times[name]:.3f}" for name in names]
        rows.append((f"{cell.spread:g}", cell.delay, cell.limit, *times, f"{cell.behind:.3f}"))
    return table(["sd", "middle link", "limit", *names, "best hint over the rule"], rows)


def main() -> int:
    """Simulate, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--write", action="store_true", help="the table into results/rivals.md")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="runs of 9 steps (4)")
    options = parser.parse_args()
    found = list(cells(options.seeds))
    print(shown := markdown(found))
    if options.write:
        put_figures(PAGE, "slow link", f"\n{shown}\n\n")
    worst = max(found, key=lambda cell: cell.behind)
    where = f"sd {worst.spread:g}, {worst.delay}, limit {worst.limit}"
    behind = 100 * (worst.behind - 1)
    aims = [Aim(f"best hint behind PipeMorph's rule, worst ({where})", behind, 1.0, "%")]
    return finish(options, {"cells": [asdict(cell) for cell in found]}, aims)


if __name__ == "__main__":
    sys.exit(main())
