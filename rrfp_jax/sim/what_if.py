"""What a step that ran would have taken if one thing had been different: its own costs, replayed by the core.

The replay of the step as it was says how far to trust the others: see `WhatIfs.error`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.measure.costs import Costs, TableCosts, recorded
from rrfp_jax.core.measure.recorded_step import RecordedStep, replayed_costs
from rrfp_jax.core.schedules import Schedule, by_name, name_of
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, INPUT, WEIGHT, Task
from rrfp_jax.sim.engine import simulate

TRUSTED_ERROR = 0.05
"""Above this error of the replay nothing is predicted, as in ByteDance's SMon (arXiv:2505.05713)."""

SCHEDULES = (
    "bf",
    "bfw",
    "1f1b",
    "zb-h1",
    "ranked:zb-h1",
    "zb-h2",
    "ranked:zb-h2",
    "ranked:zb-v",
    "ranked:v-half",
)
"""That are tried instead of a step's own; those that its placement does not allow are left out."""

Durations: TypeAlias = Mapping[tuple[int, Task], float]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One thing that could be different.

    Attributes:
        change: in words, such as "stage 2 as fast as the others".
        kind: what is changed: "stage", "stages", "jitter", "lengths", "link", "links", "host", "in flight",
            "bytes" or "schedule".
        subject: which stage, link (two stages) or schedule; None where it is all of them.
        seconds: what the step would take.
    """

    change: str
    kind: str
    subject: Hashable = None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WhatIfs:
    """What the step would have taken.

    Attributes:
        measured: what it took (s).
        replayed: what the simulator says that it took (s); what is saved is counted from here.
        changes: the one that saves most first.
    """

    measured: float
    replayed: float
    changes: Sequence[WhatIf]

    @property
    def error(self) -> float:
        """How far the simulator is off on the step as it was, as a share of what that took."""
        return abs(self.replayed - self.measured) / self.measured if self.measured else 0.0

    def saved(self, change: WhatIf) -> float:
        """The share of the step that a change saves; negative if it costs."""
        return 1.0 - change.seconds / self.replayed if self.replayed else 0.0


def what_ifs(step: RecordedStep, schedules: Sequence[str] = SCHEDULES) -> WhatIfs:
    """Replay a step as it was, and with one thing changed at a time.

    Args:
        step: with a backward.
        schedules: by name, to try instead of its own.
    """
    costs = replayed_costs(step.trace)
    base = _seconds(step, step.rules, costs)
    found = [
        WhatIf(change=change, kind=kind, subject=subject, seconds=seconds())
        for change, kind, subject, seconds in _changes(step, costs, schedules)
    ]
    found.sort(key=lambda change: change.seconds)
    return WhatIfs(measured=step.trace.makespan, replayed=base, changes=found)


def _seconds(step: RecordedStep, rules: StepRules, costs: Costs) -> float:
    return simulate(rules, costs, budgets=step.budgets, lead=step.lead).makespan


Change: TypeAlias = tuple[str, str, Hashable, Callable[[], float]]


def _changes(step: RecordedStep, costs: TableCosts, schedules: Sequence[str]) -> Iterator[Change]:
    rules = step.rules

    def with_costs(changed: TableCosts) -> Callable[[], float]:
        return lambda: _seconds(step, rules, changed)

    def with_durations(changed: Durations) -> Callable[[], float]:
        return with_costs(replace(costs, durations=changed))

    yield from _speeds(step, costs, with_durations)
    usual = _usual(step, costs.durations)
    yield "no jitter: every task as long as its length makes it", "jitter", None, with_durations(usual.steady)
    yield "microbatches equally long", "lengths", None, with_durations(usual.even)
    yield "no time of the host", "host", None, with_costs(recorded(step.trace))
    for a, b in sorted({(s, _to(step, s, task)) for s, task in costs.transfers}):
        half = {
            (s, t): x / 2 if (s, _to(step, s, t)) == (a, b) else x for (s, t), x in costs.transfers.items()
        }
        yield (
            f"the link from stage {a} to {b} twice as fast",
            "link",
            (a, b),
            with_costs(replace(costs, transfers=half)),
        )
    yield "no time in transfers", "links", None, with_costs(replace(costs, transfers={}))
    yield from _limits(step, costs)
    for name in schedules:
        schedule = by_name(name)
        if (
            name != name_of(rules.schedule)
            and schedule.placement_for(rules.placement.stages, rules.placement.chunks) == rules.placement
        ):
            yield f"schedule {name}", "schedule", name, _scheduled(step, costs, schedule)


def _speeds(
    step: RecordedStep, costs: TableCosts, seconds: Callable[[Durations], Callable[[], float]]
) -> Iterator[Change]:
    """Stages as fast as others; what differs between them stays."""
    stages = range(step.trace.stages)
    busy = [sum(x for (s, _), x in costs.durations.items() if s == stage) for stage in stages]
    if len(busy) < 2 or not all(busy):
        return
    mean = fmean(busy)
    equal = {(s, t): x * mean / busy[s] for (s, t), x in costs.durations.items()}
    yield "all stages equally fast", "stages", None, seconds(equal)
    for stage in stages:
        usual = median(busy[:stage] + busy[stage + 1 :])
        if busy[stage] > usual > 0:
            factor = usual / busy[stage]
            one = {(s, t): x * factor if s == stage else x for (s, t), x in costs.durations.items()}
            yield f"stage {stage} as fast as the others", "stage", stage, seconds(one)


def _limits(step: RecordedStep, costs: TableCosts) -> Iterator[Change]:
    """More in flight, as far as there is a limit."""
    rules, budgets = step.rules, step.budgets
    if step.fixed_order:
        return
    if rules.limit is not None and rules.limit < rules.microbatches:
        more = replace(rules, limit=rules.limit + 1)
        yield "one microbatch more in flight", "in flight", 1, lambda: _seconds(step, more, costs)
    if budgets and any(budgets):
        larger = [budget and replace(budget, limit=budget.limit * 3 // 2, most=None) for budget in budgets]
        wider = replace(step, budgets=larger)
        yield "1.5 times the bytes", "bytes", 1.5, lambda: _seconds(wider, rules, costs)


def _scheduled(step: RecordedStep, costs: TableCosts, schedule: Schedule) -> Callable[[], float]:
    """With another schedule: infinitely long where that cannot run within the step's limits."""

    def seconds() -> float:
        try:
            return _seconds(step, replace(step.rules, schedule=schedule), _Halves(costs))
        except (ValueError, RuntimeError):
            return float("inf")

    return seconds


@dataclass(frozen=True)
class _Halves(Costs):
    """Costs of fused backwards for schedules that split them: each half takes half of it."""

    inner: TableCosts

    def duration(self, stage: int, task: Task) -> float:
        if task.kind in (INPUT, WEIGHT) and (stage, task) not in self.inner.durations:
            return self.inner.duration(stage, task._replace(kind=BACKWARD)) / 2
        return self.inner.duration(stage, task)

    def transfer(self, stage: int, task: Task) -> float:
        kinds = (task.kind,) if task.kind not in (BACKWARD, INPUT) else (BACKWARD, INPUT)
        return max(self.inner.transfer(stage, task._replace(kind=kind)) for kind in kinds)


class _Usual(NamedTuple):
    """Durations without jitter, and without the differences of lengths."""

    steady: Durations
    even: Durations


def _usual(step: RecordedStep, durations: Durations) -> _Usual:
    """What is left of a task's time if it is a usual time times a factor of its bucket, and a rest.

    The usual time is the median of the stage's tasks of that kind; a bucket's factor the median of what its
    tasks of a kind, on all stages, take beside their usual times. The rest is jitter.
    """
    groups, ratios = defaultdict(list), defaultdict(list)
    for (stage, (kind, chunk, _)), seconds in durations.items():
        groups[stage, kind, chunk].append(seconds)
    base = {group: median(found) for group, found in groups.items()}
    for (stage, (kind, chunk, j)), seconds in durations.items():
        own = base[stage, kind, chunk]
        ratios[kind, step.buckets[j]].append(seconds / own if own else 1.0)
    factors = {key: median(found) for key, found in ratios.items()}
    kinds = {kind for kind, _ in factors}
    mean = {
        kind: fmean(factors[kind, name] for name in step.buckets if (kind, name) in factors) for kind in kinds
    }
    steady, even = {}, {}
    for (stage, task), seconds in durations.items():
        kind, chunk, j = task
        factor = factors[kind, step.buckets[j]]
        steady[stage, task] = base[stage, kind, chunk] * factor
        even[stage, task] = seconds * mean[kind] / factor if factor else seconds
    return _Usual(steady, even)


def _to(step: RecordedStep, stage: int, task: Task) -> int:
    destination = step.rules.placement.destination(stage, task)
    assert destination is not None, f"{task} of stage {stage} sends nothing"
    return destination[0]
