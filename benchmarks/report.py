"""How far reports can be trusted: do they name what spoils a run, and do what-ifs say what a change gains?"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, percent_longer, say
from benchmarks.paced import run_paced, run_steps
from configs import quickstart
from rrfp_jax.report.causes import Finding, ways_of
from rrfp_jax.report.explanation import TimedStep, explain
from rrfp_jax.report.what_if import what_ifs as changes_of
from rrfp_jax.sim.splits import Layers
from rrfp_jax.trace.costs import Table, Workload, log_normal
from rrfp_jax.trace.idleness import stage_times
from rrfp_jax.trace.layers import LayerWork, Work

STAGES, MICROBATCHES = 4, 16
EVEN = (5, 5, 5, 5)
BLOCK_SECONDS = 4e-3
TASKS = ("forward", "backward_input", "backward_weight")
STEPS, WARM_UP = 14, 4


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A run of equal blocks on paced devices; times in seconds.

    Attributes:
        split: blocks of each stage.
        slowness: of each stage: how many times as long its tasks take.
        lengths: of each microbatch, as its blocks' times go with it.
        hop: that a message takes.
        link, link_seconds: messages after this stage, there and back, take so long; None for a hop.
        limit: most microbatches in flight.
        jitter: sd of the logarithm of what tasks take; below 0, each takes the median of that of its stage.
    """

    seed: int
    split: tuple[int, ...] = EVEN
    slowness: tuple[float, ...] = (1.0,) * STAGES
    lengths: tuple[float, ...] = (1.0,) * MICROBATCHES
    hop: float = 1e-3
    link: int = 0
    link_seconds: float | None = None
    schedule: str = "bf"
    limit: int = 2 * STAGES
    jitter: float = 0.03

    @property
    def workload(self) -> Workload:
        drawn = log_normal(
            *(STAGES, MICROBATCHES),
            forward=BLOCK_SECONDS,
            sigma=abs(self.jitter),
            shared=0.0,
            seed=self.seed,
            transfer=self.hop,
        )
        if self.jitter < 0:
            drawn = replace(drawn, **{name: _steady(getattr(drawn, name)) for name in TASKS})
        factors = [
            [blocks * slow * length for length in self.lengths]
            for blocks, slow in zip(self.split, self.slowness, strict=True)
        ]
        own = drawn.scaled(factors, factors)
        forward, backward = list(own.transfer_forward), list(own.transfer_backward)
        if self.link_seconds is not None:
            forward[self.link] = backward[self.link + 1] = (self.link_seconds,) * MICROBATCHES
        return replace(own, transfer_forward=tuple(forward), transfer_backward=tuple(backward))

    @cache  # noqa: B019  # frozen, and there are few
    def run(self) -> Sequence[TimedStep]:
        """Its steps after the first ones, with what the blocks' shapes say."""
        work = Work([LayerWork("Block", BLOCK_SECONDS, 1)] * sum(self.split), self.split)
        steps = run_paced(self.workload, self.schedule, self.limit, STEPS)[WARM_UP:]
        return [replace(step, recorded=replace(step.recorded, work=lambda: work)) for step in steps]


def _steady(rows: Table) -> Table:
    return tuple((median(row),) * len(row) for row in rows)


@dataclass(frozen=True, kw_only=True)
class LateData(quickstart.Quickstart):
    """The quickstart, whose microbatches take so many seconds longer to load."""

    load_seconds: float = 0.0

    def train_data(self) -> Any:
        return _Late(super().train_data(), self.load_seconds)


@dataclass(frozen=True)
class _Late:
    inner: Any
    seconds: float

    def plan(self, step: int) -> Sequence[rrfp.Microbatch]:
        return self.inner.plan(step)  # type: ignore[no-any-return]

    def load(self, microbatch: rrfp.Microbatch, names: Collection[str]) -> Mapping[str, Any]:
        sleep(self.seconds)
        return self.inner.load(microbatch, names)  # type: ignore[no-any-return]


def get_config() -> LateData:
    """This file is a config like any other; nothing late."""
    known = quickstart.get_config()
    return LateData(**{field.name: getattr(known, field.name) for field in fields(known)})


@dataclass(frozen=True)
class Computed:
    """A run of the quickstart, the loading of whose microbatches takes so many seconds more."""

    load_seconds: float = 0.0

    def run(self) -> Sequence[TimedStep]:
        with tempfile.TemporaryDirectory() as folder:
            given = {"load_seconds": self.load_seconds, "steps": STEPS, "validation_steps": 1}
            return run_steps("benchmarks/report.py", Path(folder), given)[WARM_UP:]


Case = tuple[Blocks | Computed, Blocks | Computed, Callable[[Finding], bool]]
"""The spoilt run, the same without that, and whether a finding names what is wrong."""


def _uneven_split(draw: random.Random, good: Blocks) -> Case:
    stage, more = draw.randrange(STAGES), draw.choice((1, 2))
    split = tuple(5 + (STAGES - 1) * more if s == stage else 5 - more for s in range(STAGES))

    def named(found: Finding) -> bool:
        return found.kind == "split" and found.sentence.startswith(f"Stage {stage} has ")

    return replace(good, split=split), good, named


def _slow_rank(draw: random.Random, good: Blocks) -> Case:
    rank, factor = draw.randrange(STAGES), draw.uniform(1.4, 2.0)
    spoilt = replace(good, slowness=tuple(factor if s == rank else 1.0 for s in range(STAGES)))
    return spoilt, good, lambda found: (found.kind, found.subject) == ("stage", rank)


def _slow_link(draw: random.Random, good: Blocks) -> Case:
    link = draw.randrange(STAGES - 1)

    def named(found: Finding) -> bool:
        return found.kind == "link" and {*ways_of(found.subject)} <= {(link, link + 1), (link + 1, link)}

    return replace(good, link=link, link_seconds=draw.uniform(0.04, 0.08)), good, named


def _small_limit(draw: random.Random, good: Blocks) -> Case:
    spoilt, undone = replace(good, limit=draw.choice((2, 3))), replace(good, limit=MICROBATCHES)
    return spoilt, undone, lambda found: found.kind == "in flight"


def _unequal_lengths(draw: random.Random, good: Blocks) -> Case:
    drawn = [draw.choice((0.25, 0.5, 1.0, 3.0)) for _ in range(MICROBATCHES)]
    lengths = tuple(length * MICROBATCHES / sum(drawn) for length in drawn)
    return replace(good, lengths=lengths), good, lambda found: found.kind == "lengths"


def _late_data(draw: random.Random, good: Blocks) -> Case:
    """Loading a step takes longer than the step."""
    return Computed(draw.uniform(0.06, 0.1)), Computed(), lambda found: found.kind == "data"


CASES: Mapping[str, Callable[[random.Random, Blocks], Case]] = {
    "uneven split": _uneven_split,
    "slow rank": _slow_rank,
    "slow link": _slow_link,
    "small limit": _small_limit,
    "unequal lengths": _unequal_lengths,
    "late data": _late_data,
}


@bench(
    "Does the report name what spoils a run, and what undoing it gains?",
    minutes="14",
    aims="all named; gains 10 % off; 1 % of a step unaccounted",
)
def spoilt(seeds: tuple[int, ...] = (11, 12, 13), cases: tuple[str, ...] = tuple(CASES)) -> Found:
    """Six runs of four processes are each spoilt in one known way, and run once more without that. The seed
    says which stage, rank or link it is, and how bad. Devices are paced, as few cores cannot compute for
    four; what the blocks of a stage take is told to the device and, as shapes say it of a model, to the
    report. Late data is that of the quickstart, which computes."""
    rows = []
    for seed in seeds:
        for name in cases:
            rows.append(row := _spoilt(name, seed))
            say(row)
    named = sum(row["right"] for row in rows) / len(rows)
    return Found(
        {"cases": rows},
        [
            Aim("cases that are named", named, 1.0, "", at_least=True),
            *(Aim(f"gain of {r['case']}, seed {r['seed']}, off by", 100 * _off(r), 10.0, "%") for r in rows),
            Aim("unaccounted", 100 * max(row["unaccounted"] for row in rows), 1.0, "% of a step"),
        ],
    )


def _off(row: Mapping[str, Any]) -> float:
    """How far the prediction is off, as a share of what was gained."""
    return abs(row["predicted"] / row["measured"] - 1) if row["measured"] else float("inf")


def _spoilt(name: str, seed: int) -> dict[str, Any]:
    """What the report says would be saved of a step, and what was; the most that a stage's causes and its
    computing miss of a step's makespan, as a share."""
    bad, good, named = CASES[name](random.Random(f"{name} {seed}"), Blocks(seed=seed))
    steps, undone = bad.run(), good.run()
    found = explain(steps)
    was, now = (median(step.wall_seconds for step in own) for own in (steps, undone))
    missed = [
        abs(sum(own.values()) / step.recorded.trace.makespan - 1)
        for step in steps
        for own in stage_times(step.recorded.trace, step.recorded.fixed_order, step.recorded.grouped)
    ]
    return {
        "case": name,
        "seed": seed,
        "sentence": found.sentence,
        "right": named(found.finding),
        "predicted": found.finding.share,
        "measured": 1 - now / was,
        "unaccounted": max(missed),
    }


LENGTHS = (0.4, 0.6, 2.2, 0.8, 1.0, 0.4, 1.4, 1.2, 0.6, 2.0, 0.4, 0.8, 1.6, 0.6, 1.2, 0.8)
"""Of the microbatches, beside their mean."""


def _pairs(seed: int) -> Iterator[tuple[Blocks, str, Blocks]]:
    """A run, how the report calls a change of it, and the run with that change."""
    even = Blocks(seed=seed)
    lengths = tuple(length * MICROBATCHES / sum(LENGTHS) for length in LENGTHS)
    yield replace(even, slowness=(1.0, 1.5, 1.0, 1.0)), "stage 1 as fast as the others", even
    yield replace(even, slowness=(1.3, 1.0, 1.6, 1.0)), "all stages equally fast", even
    uneven, better = replace(even, split=(7, 5, 5, 3)), replace(even, split=(6, 6, 5, 3))
    yield uneven, "split 5,5,5,5 instead of 7,5,5,3", replace(even, split=EVEN)
    yield uneven, "layer 6 (Block) on stage 1 instead of 0", better
    jitter = replace(even, jitter=0.3)
    yield jitter, "no jitter: tasks of equal lengths take equal times", replace(even, jitter=-0.3)
    yield replace(even, lengths=lengths), "microbatches of equal lengths", even
    slow = replace(even, link=1, link_seconds=0.06)
    yield slow, "the links between stages 1 and 2 as fast as the others", even
    late = replace(even, hop=0.03)
    yield late, "all links twice as fast", replace(even, hop=0.015)
    yield late, "one microbatch more in flight", replace(late, limit=late.limit + 1)
    few = replace(late, limit=4)
    yield few, "one microbatch more in flight", replace(late, limit=5)
    yield few, "no limit on microbatches in flight", replace(late, limit=MICROBATCHES)
    for name in ("bfw", "1f1b"):
        yield jitter, f"schedule {name}", replace(jitter, schedule=name)
    fixed = replace(jitter, schedule="1f1b")
    yield fixed, "schedule zb-h1", replace(jitter, schedule="zb-h1")
    yield fixed, "schedule bf with as many microbatches in flight, 4", replace(jitter, limit=4)


@bench("Do runs with a change take what the what-if predicts?", minutes="14", aims="3 % off in the median")
def what_ifs(seeds: tuple[int, ...] = (21, 22), most: int = 0) -> Found:
    """Paced runs of four processes. For each change the step time that the report predicts from the one run
    stands beside that of the other run; `--most=N` tries only the first N. More bytes are not among the
    changes, since paced stages hold none."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for run, change, changed in list(_pairs(seed))[: most or None]:
            rows.append(row := {"change": change, "seed": seed, **_predicted(run, change, changed)})
            say(row)
    return Found(
        {"changes": rows}, [Aim("what-ifs, off by, median", median(r["off"] for r in rows), 3.0, "%")]
    )


def _predicted(run: Blocks, change: str, changed: Blocks) -> dict[str, float]:
    steps = [step.recorded for step in run.run()]
    layers = Layers.of(steps)
    found = [one for step in steps for one in changes_of(step, layers=layers).changes if one.change == change]
    if len(found) < len(steps) / 2:
        raise RuntimeError(f"{change!r} is not among the changes of most steps")
    before, measured = (median(s.recorded.trace.makespan for s in own.run()) for own in (run, changed))
    predicted = median(one.seconds for one in found)
    off = abs(percent_longer(predicted, measured))
    return {"before": before, "predicted": predicted, "measured": measured, "off": off}
