"""Dispatching ahead of readiness, in the simulator: what is lost to a host without latency?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf, sqrt
from statistics import mean, stdev
from typing import Any

from benchmarks.harness import Aim, Found, bench, percent_longer, say, side_by_side, table
from benchmarks.hosted import Host, HostSimulation
from rrfp_jax.core.foresight import DEEPEST, ROUND_TRIP_SECONDS, Dispatching
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.disturbances import Disturbed
from rrfp_jax.trace.costs import StepCosts, WorkloadCosts, constant, log_normal

SCHEDULES = ("bf", "bfw", "ranked:zb-v", "1f1b")
SIZES = ((4, 8), (4, 32), (8, 16), (8, 64))
"""Stages and microbatches."""

SIGMAS = {0.1: 0.5, 0.3: 1.3}
"""With the most that may be lost, in per cent of the step."""

FORWARD_SECONDS, COPY_SECONDS, LATE_SECONDS = 1e-3, 30e-6, 1e-3
STRAGGLERS, TIMES_LONGER = 0.05, 5.0
LENGTHS = (0.5, 1.0, 2.0)
HOW: Sequence[Dispatching] = ("ready", "foreseen")
WORSE = 0.3
"""Per cent of a step by which a mean may be worse than "ready"."""

MOST = 16
"""At most so many times as many seeds, as long as a mean is within two standard errors of its limit."""


@dataclass(frozen=True)
class Scaled(Disturbed):
    """Tasks that take other times, by microbatch; with some seed, stragglers among them; one link slower."""

    factors: Mapping[int, float] = field(default_factory=dict)
    all_tasks: float = 1.0
    seed: int = -1
    late_link: float = 0.0
    random_late: float = 0.0

    def duration(self, stage: int, task: Task) -> float:
        """See `StepCosts.duration`."""
        seconds = self.inner.duration(stage, task) * self.all_tasks * self.factors.get(task.microbatch, 1.0)
        return seconds * TIMES_LONGER if self._draw("task", stage, task) < STRAGGLERS else seconds

    def transfer(self, stage: int, task: Task) -> float:
        """See `StepCosts.transfer`."""
        seconds = self.inner.transfer(stage, task) + (self.late_link if stage == 1 else 0.0)
        return seconds + self.random_late * self._draw("transfer", stage, task) ** 4

    def _draw(self, what: str, stage: int, task: Task) -> float:
        return 1.0 if self.seed < 0 else random.Random(f"{what} {self.seed} {stage} {task}").random()


Kind = Callable[[StepCosts, StepCosts, int, int], tuple[StepCosts, StepCosts]]
"""Changes costs and estimates, given the microbatches and the seed."""


def _lengths(costs: StepCosts, estimates: StepCosts, count: int, seed: int) -> tuple[StepCosts, StepCosts]:
    draw = random.Random(seed)
    factors = {j: draw.choice(LENGTHS) for j in range(count)}
    return Scaled(costs, factors), Scaled(estimates, factors)  # buckets have estimates of their own


KINDS: dict[str, Kind] = {
    "as estimated": lambda costs, estimates, count, seed: (costs, estimates),
    "estimates half": lambda costs, estimates, *_: (costs, Scaled(estimates, all_tasks=0.5)),
    "estimates 1.5 times": lambda costs, estimates, *_: (costs, Scaled(estimates, all_tasks=1.5)),
    "stragglers": lambda costs, estimates, count, seed: (Scaled(costs, seed=seed), estimates),
    "a slow link, learned": lambda costs, estimates, *_: (
        Scaled(costs, late_link=LATE_SECONDS),
        Scaled(estimates, late_link=LATE_SECONDS),
    ),
    "a late link, unknown": lambda costs, estimates, *_: (Scaled(costs, late_link=LATE_SECONDS), estimates),
    "three lengths": _lengths,
}


Cell = tuple[str, tuple[int, int], str, float]
"""A kind of steps, stages and microbatches, a schedule, a sigma."""

Losses = dict[Dispatching, list[float]]


def losses(cell: Cell, seeds: Iterable[int], deepest: int = DEEPEST) -> Losses:
    """Per cent by which steps are longer than on a host without latency, by dispatch, for each seed."""
    kind, (stages, count), schedule, sigma = cell
    rule = by_name(schedule)
    placement = rule.placement_for(stages, 2 if schedule.endswith("zb-v") else 1)
    rules = StepRules(placement=placement, microbatches=count, schedule=rule, limit=2 * stages)
    plain = constant(stages, count, FORWARD_SECONDS, transfer=COPY_SECONDS)
    found: Losses = {how: [] for how in HOW}
    for seed in seeds:
        drawn = log_normal(
            *(stages, count),
            forward=FORWARD_SECONDS,
            sigma=sigma,
            shared=0.0,
            seed=seed,
            transfer=COPY_SECONDS,
        )
        costs, estimates = (WorkloadCosts(workload, placement) for workload in (drawn, plain))
        real, expected = KINDS[kind](costs, estimates, count, seed)
        best = simulate(rules, real).makespan
        for how, own in found.items():
            host = Host(dispatch=how, deepest=deepest)
            own.append(percent_longer(HostSimulation(rules, real, expected, host).run().makespan, best))
    return found


def _judged(cell: Cell, found: Losses) -> Iterator[tuple[str, list[float], float]]:
    """What has a limit: its name, its values, and the limit."""
    yield (
        "foreseen over ready",
        [f - r for f, r in zip(found["foreseen"], found["ready"], strict=True)],
        WORSE,
    )
    if cell[0] == "as estimated":
        yield f"loss at sigma {cell[-1]}", found["foreseen"], SIGMAS[cell[-1]]


def _settled(seeds: int, deepest: int, cell: Cell) -> Losses:
    """The losses of so many seeds, and of as many again while noise would decide about a limit."""
    found: Losses = {how: [] for how in HOW}
    for first in range(0, MOST * seeds, seeds):
        for how, more in losses(cell, range(first, first + seeds), deepest).items():
            found[how] += more
        judged = _judged(cell, found)
        if all(
            len(own) > 1 and abs(mean(own) - limit) > 2 * stdev(own) / sqrt(len(own))
            for _, own, limit in judged
        ):
            break
    return found


@bench(
    "A host that takes its time: what does a step lose by it, with inputs foreseen and without?",
    minutes="15 *",
    aims="foreseen: 0.5 % (sigma 0.1), 1.3 % (0.3); nowhere 0.3 % worse than without",
)
def foresight(seeds: int = 20, jobs: int = 0, deepest: int = DEEPEST) -> Found:
    """Simulated steps of 4 and 8 stages with 8 to 64 microbatches, F 1 ms, B 2 ms, log-normal around what the
    host expects; a round trip of the host takes 200 us, a copy 30. The loss is against a host without
    latency; the mean over seeds, more of them where noise would decide. What was expected is also half and
    1.5 times as long; 5 % of the tasks take five times as long; a link is 1 ms slower, known or not;
    microbatches have three lengths, all known. A device is given `deepest` programs at most: 2 where bytes
    are limited."""
    cells = list(product(KINDS, SIZES, SCHEDULES, SIGMAS))
    rows, aims, worst = [], list[Aim](), dict[str, tuple[float, str, float]]()
    for cell, found in zip(cells, side_by_side(partial(_settled, seeds, deepest), cells, jobs), strict=True):
        kind, (stages, count), schedule, sigma = cell
        ready, foreseen = mean(found["ready"]), mean(found["foreseen"])
        where = f"{kind}, {schedule}, {stages} x {count}, sigma {sigma}, {len(found['ready'])} seeds"
        rows.append([kind, schedule, stages, count, sigma, ready, foreseen])
        say(f"{where}: {ready:.2f} % ready, {foreseen:.2f} % foreseen")
        for name, own, limit in _judged(cell, found):
            worst[name] = max(worst.get(name, (-inf, "", limit)), (mean(own), where, limit))
    for name, (value, where, limit) in sorted(worst.items()):
        aims.append(Aim(f"{name}, at worst ({where})", value, limit, "%"))
    heads = ["steps", "schedule", *(f"{how}, sigma {sigma}" for sigma in SIGMAS for how in HOW)]
    lines = [
        [kind, schedule, *(_sizes(rows, kind, schedule, sigma, at) for sigma in SIGMAS for at in (5, 6))]
        for kind, schedule in product(KINDS, SCHEDULES)
    ]
    note = f"Per cent of a step, for {' / '.join(f'{s} x {m}' for s, m in SIZES)} stages and microbatches; "
    note += f"a host's round trip takes {1e6 * ROUND_TRIP_SECONDS:.0f} us; means of {seeds} seeds or more."
    return Found(rows, aims, {"simulated.md foresight": f"{table(heads, lines)}\n\n{note}"})


def _sizes(rows: Sequence[Sequence[Any]], kind: str, schedule: str, sigma: float, at: int) -> str:
    """A column of the rows of all sizes."""
    own = [row for row in rows if (row[0], row[1], row[4]) == (kind, schedule, sigma)]
    return " / ".join(f"{row[at]:.1f}" for row in own)
