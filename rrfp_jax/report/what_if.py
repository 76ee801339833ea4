"""What a step that ran would have taken if one thing had been different: its own costs, replayed by the core.

The replay of the step as it was says how far to trust the others: see `WhatIfs.error`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules, charges_of
from rrfp_jax.core.tasks import INPUT, Task
from rrfp_jax.sim.engine import Leads, simulate
from rrfp_jax.sim.splits import Layers
from rrfp_jax.trace.costs import StepCosts, TableCosts, recorded
from rrfp_jax.trace.records import RecordedStep, StepTrace, peak_charge
from rrfp_jax.trace.replayed import replay_of

SCHEDULES = (
    *("bf", "bfw", "1f1b", "zb-h1", "ranked:zb-h1", "zb-h2", "ranked:zb-h2"),
    *("zb-v", "ranked:zb-v", "v-half", "ranked:v-half"),
)
"""That are tried instead of a step's own; those that its placement does not allow are left out."""

FEW_SCHEDULES = ("bf", "bfw", "zb-h1", "ranked:zb-v")
"""The schedules that are tried with large steps."""

SLOWEST = 3
"""So many stages, and so many links, are each tried by itself: those that are slowest beside the others."""

SLOW = 1.05
"""A stage that takes so many times as long for the same work is called slow."""

Link: TypeAlias = tuple[int, int]
"""From one stage to another."""


Variant: TypeAlias = tuple[str, Hashable, str, StepCosts, RecordedStep]
"""A step with one thing different: kind, subject and change as in `WhatIf`, the costs, the step."""


def _variants(
    step: RecordedStep, costs: TableCosts, schedules: Sequence[str], layers: Layers | None, slowest: int
) -> Iterator[Variant]:
    """All that is tried with a step; so many stages, and links, each by itself."""
    yield from _speeds(step, costs, layers, slowest)
    if layers is not None:
        for recut in layers.recuts():
            yield "split", recut, recut.change, *layers.recut(step, costs, recut.split)
    yield from _injected(step, costs)
    yield from _lengths(step, costs, slowest)
    yield "host", None, "no time of the host", recorded(step.trace), step
    yield from _links(step, costs, slowest)
    yield from _limits(step, costs)
    yield from _schedules(step, costs, schedules)


def _schedules(step: RecordedStep, costs: TableCosts, names: Sequence[str]) -> Iterator[Variant]:
    """Other schedules on the same placement; in place of a fixed order, hints that hold as much as it did."""
    rules, own = step.rules, step.rules.name
    placement, held = rules.placement, _held(step.trace, rules)
    for name in names:
        schedule = by_name(name)
        if name == own or schedule.placement_for(placement.stages, placement.chunks) != placement:
            continue
        change, limit = f"schedule {name}", rules.limit
        if step.fixed_order and not isinstance(schedule, FixedOrder):
            limit = int(held // placement.chunks)
            change = f"schedule {name} with as many microbatches in flight, {limit}"
        other = replace(step, rules=replace(rules, schedule=schedule, limit=limit))
        if _splits(other.rules) and not _splits(rules):
            change += SPLIT
        yield "schedule", name, change, costs, other


def _splits(rules: StepRules) -> bool:
    """Whether any backward runs as its two halves."""
    stages = range(rules.placement.stages)
    return any(INPUT in kinds for stage in stages for kinds in rules.backward_kinds(stage))


def _speeds(step: RecordedStep, costs: TableCosts, layers: Layers | None, slowest: int) -> Iterator[Variant]:
    """Stages as fast as others; what differs between their tasks, and what layers have to do, stays."""
    busy = [0.0] * step.trace.stages
    for (stage, _), seconds in costs.durations.items():
        busy[stage] += seconds
    if len(busy) < 2 or not all(busy):
        return

    def scaled(factors: Sequence[float]) -> TableCosts:
        return replace(costs, durations={(s, t): x * factors[s] for (s, t), x in costs.durations.items()})

    slowness = [1.0] * len(busy) if layers is None else layers.shares.slowness
    mean = fmean(busy)
    equal = [mean / own for own in busy] if layers is None else [1 / own for own in slowness]
    if layers is None or max(slowness) > SLOW:
        yield "stages", None, "all stages equally fast", scaled(equal), step
    usual = [median(busy[:stage] + busy[stage + 1 :]) for stage in range(len(busy))]
    longest = sorted((own / others, s) for s, (own, others) in enumerate(zip(busy, usual, strict=True)))
    for ratio, stage in longest[-slowest:]:
        slow = slowness[stage] > SLOW
        factor = slowness[stage] if slow else ratio
        if factor > 1:
            kind = "stage" if slow or layers is None else "uneven"
            what = f"stage {stage} as fast as the others"
            change = what if kind == "stage" else f"{what}, with as much to do"
            factors = [1 / factor if s == stage else 1.0 for s in range(len(busy))]
            yield kind, stage, change, scaled(factors), step


def _injected(step: RecordedStep, costs: TableCosts) -> Iterator[Variant]:
    """Without the delays that were injected on purpose, if there are any."""
    durations, transfers = dict(costs.durations), dict(costs.transfers)
    for record in step.trace.records:
        durations[record.stage, record.task] -= record.delayed
        sender = step.trace.sender(record) if record.late else None
        sent = None if sender is None else (sender.stage, sender.task)
        if sent in transfers:
            transfers[sent] = max(transfers[sent] - record.late, 0.0)
    if any(record.delayed or record.late for record in step.trace.records):
        yield "injected", None, "no injected delays", TableCosts(durations, transfers), step


def _lengths(step: RecordedStep, costs: TableCosts, slowest: int) -> Iterator[Variant]:
    """Without jitter, and without the differences of lengths.

    A task takes the usual time of its stage and kind, which is the median, times a factor of its bucket,
    times a rest. The factor is the median, over the bucket's tasks of that kind on all stages, of what they
    take beside their usual times. The rest is jitter.
    """
    groups, ratios = defaultdict(list), defaultdict(list)
    for (stage, (kind, chunk, _)), seconds in costs.durations.items():
        groups[stage, kind, chunk].append(seconds)
    usual = {group: median(found) for group, found in groups.items()}
    for (stage, (kind, chunk, j)), seconds in costs.durations.items():
        own = usual[stage, kind, chunk]
        ratios[kind, step.buckets[j]].append(seconds / own if own else 1.0)
    factors = {key: median(found) for key, found in ratios.items()}
    kinds = {kind for kind, _ in factors}
    mean = {k: fmean(factors[k, name] for name in step.buckets if (k, name) in factors) for k in kinds}
    steady, even, excess = {}, {}, [0.0] * step.trace.stages
    for (stage, task), seconds in costs.durations.items():
        kind, chunk, j = task
        factor = factors[kind, step.buckets[j]]
        steady[stage, task] = usual[stage, kind, chunk] * factor
        even[stage, task] = seconds * mean[kind] / factor if factor else seconds
        excess[stage] += abs(seconds - steady[stage, task])
    no_jitter = "no jitter: tasks of equal lengths take equal times"
    yield "jitter", None, no_jitter, replace(costs, durations=steady), step
    for stage in sorted(range(len(excess)), key=excess.__getitem__)[-slowest:]:
        alone = {own: (steady if own[0] == stage else costs.durations)[own] for own in steady}
        yield "jitter", stage, f"no jitter on stage {stage}", replace(costs, durations=alone), step
    yield "lengths", None, "microbatches of equal lengths", replace(costs, durations=even), step


def _links(step: RecordedStep, costs: TableCosts, slowest: int) -> Iterator[Variant]:
    """Links as fast as others, or all of them faster; what differs between their messages stays."""
    by_link: dict[Link, list[float]] = defaultdict(list)
    for (stage, task), seconds in costs.transfers.items():
        by_link[_link(step, stage, task)].append(seconds)
    usual = {link: median(found) for link, found in by_link.items()}

    def scaled(factors: Mapping[Link, float]) -> TableCosts:
        transfers = {(s, t): x * factors.get(_link(step, s, t), 1.0) for (s, t), x in costs.transfers.items()}
        return replace(costs, transfers=transfers)

    excess: dict[Link, float] = {}  # over the other links
    factors: dict[Link, float] = {}
    for link, own in usual.items():
        others = [seconds for other, seconds in usual.items() if other not in (link, link[::-1])]
        if others and own > median(others):
            excess[link], factors[link] = own - median(others), median(others) / own
    both = {link: excess[link] + excess[link[::-1]] for link in excess if link < link[::-1] in excess}
    for link in sorted(excess, key=excess.__getitem__)[-slowest:]:
        change = f"the link from stage {link[0]} to {link[1]} as fast as the others"
        yield "link", link, change, scaled({link: factors[link]}), step
    for link in sorted(both, key=both.__getitem__)[-slowest:]:
        ways = link, link[::-1]
        change = f"the links between stages {link[0]} and {link[1]} as fast as the others"
        yield "link", ways, change, scaled({way: factors[way] for way in ways}), step
    if usual:
        yield "links", 0.5, "all links twice as fast", scaled(dict.fromkeys(usual, 0.5)), step
        yield "links", 0.0, "no time in transfers", scaled(dict.fromkeys(usual, 0.0)), step


def _link(step: RecordedStep, stage: int, task: Task) -> Link:
    destination = step.rules.placement.destination(stage, task)
    assert destination is not None, f"{task} of stage {stage} sends nothing"
    return stage, destination[0]


def _limits(step: RecordedStep, costs: TableCosts) -> Iterator[Variant]:
    """More in flight, as far as there is a limit; a fixed order holds what it holds."""
    rules, budgets = step.rules, step.budgets
    if step.fixed_order:
        return
    if rules.limit is not None and rules.limit < rules.microbatches:
        more = replace(step, rules=replace(rules, limit=rules.limit + 1))
        yield "in flight", 1, "one microbatch more in flight", costs, more
        free = replace(step, rules=replace(rules, limit=None))
        yield "in flight", None, "no limit on microbatches in flight", costs, free
    if budgets and any(budgets):
        larger = [budget and replace(budget, limit=budget.limit * 3 // 2, most=None) for budget in budgets]
        yield "bytes", 1.5, "1.5 times the bytes", costs, replace(step, budgets=larger)


SPLIT = ", splitting backwards"
SPLIT_COSTS = "A backward that is split computes 4-19 % more on CPU, which is not counted here."
"""As `python -m benchmarks split_backward` found on CPU; the simulator gives each half half of a whole."""

TRUSTED_ERROR = 0.05
"""Above this error of the replay nothing is predicted, as in ByteDance's SMon (arXiv:2505.05713)."""

LIMITED = ("schedule", "split")
"""Kinds of changes by which a step may not fit into its limits."""

MANY_TASKS = 8_000
"""Tasks of a step beyond which less is tried, so that it takes some seconds."""


class WhatIf(NamedTuple):
    """One thing that could be different, and what the step would take (s)."""

    kind: str  # what is changed, as `_variants` has it
    subject: Hashable  # which stage, links or schedule, or by how much; None for the only change of a kind
    change: str  # in words, such as "stage 2 as fast as the others"
    seconds: float


class WhatIfs(NamedTuple):
    """What the step would have taken (s)."""

    replayed: float  # what the simulator says that it took; what is saved is counted from here
    error: float  # how far that is off, as a share of what it took
    changes: Sequence[WhatIf]  # the one that saves most first


def what_ifs(step: RecordedStep, tried: Sequence[str] | None = None, layers: Layers | None = None) -> WhatIfs:
    """Replay a step with a backward as it was, and with one thing changed at a time.

    Other schedules that are `tried`, but would hold more, are left out. Of layers it may not be known what
    they take.
    """
    as_recorded = replay_of(step.trace)
    many = len(step.trace.records) > MANY_TASKS
    if tried is None:
        tried = FEW_SCHEDULES if many else SCHEDULES
    variants = _variants(step, as_recorded.costs, tried, layers, 1 if many else SLOWEST)
    found = []
    for kind, subject, change, costs, other in variants:
        try:
            trace = _replay(other, costs, {} if kind == "host" else as_recorded.leads)
        except (ValueError, RuntimeError):
            if kind not in LIMITED:  # which may not be able to run within the step's limits
                raise
            continue
        if kind != "schedule" or _fits(trace, step):
            found.append(WhatIf(kind, subject, change, trace.makespan))
    found.sort(key=lambda change: change.seconds)
    replayed, took = _replay(step, as_recorded.costs, as_recorded.leads).makespan, step.trace.makespan
    return WhatIfs(replayed=replayed, error=abs(replayed - took) / took if took else 0.0, changes=found)


def _replay(step: RecordedStep, costs: StepCosts, leads: Leads) -> StepTrace:
    return simulate(step.rules, costs, budgets=step.budgets, lead=step.lead, leads=leads)


def _fits(trace: StepTrace, step: RecordedStep) -> bool:
    """Whether another schedule holds no more than the step's might; no limit stops a fixed order."""
    _, limit = charges_of(step.rules, None)[0]
    most = _held(step.trace, step.rules) if step.fixed_order else limit
    if most is not None and _held(trace, step.rules) > most:
        return False
    budgets = enumerate(step.budgets or ())
    return all(own is None or peak_charge(trace.order(s), own.costs) <= own.limit for s, own in budgets)


def _held(trace: StepTrace, rules: StepRules) -> float:
    """The most that a stage held, in chunks of microbatches: hints that are charged whole hold no more."""
    ones, _ = charges_of(rules, None)[0]
    return max(peak_charge(trace.order(stage), ones) for stage in range(trace.stages))
