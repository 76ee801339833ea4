"""Readiness-first on the variability that others have measured; each number with its source.

Written down before any of them was simulated. Steps of one job share what is persistent: which stage, worker
or link is slow. `STEPS` seeds in a row are one job's. Every task has noise of 2 % that nobody knows (healthy
jobs: 1.5-3 %). *Unknown* are the kinds whose variability nobody knew beforehand.

    stage       the last stage takes 1.55 x in F: what stages cut unevenly still have after tuning by hand,
                which dominates in 39.3 % of the slowed jobs. In B 1.22 x, as B grew by 1.42 where F grew by
                2.07. (OSDI'25, ByteDance; persistent, so a planner has measured it)
    worker      one stage takes 3.04 x, the mean of jobs with a bad worker (OSDI'25)
    wikipedia, lmsys, humps
                one document a microbatch, cut at the window; shares below 1K, 4K, 8K, 32K and 128K tokens
                from Skrull, Table 1 (Wikipedia, LMsysChat1M; ChatQA2-Long-SFT, two humps). Time goes with
                tokens
    points      Llama-3's long SFT: 0.11 % of the documents have about 37K tokens, all else is shorter than 1K
                on average (Skrull). Packed to 37K, so one long document or 37 short ones a microbatch; time
                with the squares of lengths beside their sum
    squares     32K windows packed with documents as in Wikipedia. Time goes with the sum of squares (OSDI'25)
    multimodal  batches 4.15 x apart (DIP), the last stage slow as in StragglerAnalysis: `studies/families.py`
    link        one link takes 30 ms against forwards of 10 ms, the others 1 ms (PipeMorph; 0.4-8 ms in
                StragglerAnalysis). It lasts from under a minute to hours (Greyhound), so all of a step
    collected   planned garbage collection: every stage pauses before the same microbatch, which is known
    collecting  unplanned: one stage of the seed's choosing pauses, before a microbatch of its choosing.
                Nobody published a pause: ours is 12.6 % of a stage's work in a step, what planning saved
                where with 128 replicas nearly every step had a pause somewhere (OSDI'25). Chunks of a stage
                share it
    i.i.d.      log-normal, sd 0.3, half of the variance the task's own and unknown: the study of before

How much squares weigh beside tokens is what LLaMA3-8B's published sizes say, counted by our cost analysis,
and half of it, as attention is causal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from statistics import median

from benchmarks.harness import Aim, Found, bench, say, side_by_side, table
from benchmarks.paper.model import LANGUAGE, per_token
from benchmarks.pictures import bars
from benchmarks.simulated import FITS, FIXED, HINTS
from benchmarks.steps import Cell, Figures, figures_of, plan_within
from rrfp_jax.core.hints import BF, Ranked
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.studies.bounds import lower_bound
from rrfp_jax.studies.families import (
    ACTIVATION_BYTES,
    FAMILIES,
    FORWARD_SECONDS,
    LAST_BACKWARD,
    LAST_FORWARD,
    SLOW_TRANSFER_SECONDS,
    TRANSFER_SECONDS,
    Family,
    Step,
    noisy,
    varied,
)
from rrfp_jax.trace.costs import Workload, WorkloadCosts, constant

STEPS = 2
STAGE_FORWARD = 1.55
STAGE_BACKWARD = 1 + (LAST_BACKWARD - 1) / (LAST_FORWARD - 1) * (STAGE_FORWARD - 1)
WORKER = 3.04
PAUSE = 0.126
SHORTEST = 64
"""Tokens of the shortest document: ours, nobody says."""

K = 1024
BOUNDS = (SHORTEST, 1 * K, 4 * K, 8 * K, 32 * K, 128 * K)
WIKIPEDIA = (0.8788, 0.9934, 0.9992, 0.9999, 1.0)
LMSYS = (0.8712, 0.9935, 0.9987, 0.9998, 0.9999)
CHATQA2 = (0.2192, 0.3148, 0.4043, 0.9986, 1.0)
"""Shares of the documents below the bounds."""
WINDOW, LONG_WINDOW = 8 * K, 32 * K
LONG_SHARE, LONG, SHORT = 0.0011, 37 * K, 1 * K


def document(draw: random.Random, shares: Sequence[float], window: int) -> float:
    """Tokens of one: log-uniform between two bounds, cut at the window."""
    place, below = draw.random(), 0.0
    for (low, high), share in zip(pairwise(BOUNDS), shares, strict=True):
        if place < share:
            return min(window, low * math.exp(math.log(high / low) * (place - below) / (share - below)))
        below = share
    return window


def square_weight() -> float:
    """How many tokens' time one squared token takes."""
    linear, square = per_token(LANGUAGE["LLaMA3-8B"])
    return square / 2 / linear


def _packed(draw: random.Random, window: int) -> list[float]:
    """Documents that fill a window, the last one cut."""
    found: list[float] = []
    while (room := window - sum(found)) >= 1:
        found.append(min(room, document(draw, WIKIPEDIA, window)))
    return found


def _long_or_short(draw: random.Random) -> list[float]:
    long_tokens, short_tokens = LONG_SHARE * LONG, (1 - LONG_SHARE) * SHORT
    is_long = draw.random() < long_tokens / (long_tokens + short_tokens)
    return [LONG] if is_long else [SHORT] * (LONG // SHORT)


Documents = Callable[[random.Random], list[float]]
"""The documents of one microbatch, in tokens."""


def _lengths(documents: Documents, squares: bool) -> Family:
    """Microbatches of documents; their mean time is that of the other kinds."""

    def step(stages: int, microbatches: int, seed: int) -> Step:
        draw = random.Random(seed)
        batches = [documents(draw) for _ in range(microbatches)]
        weight = square_weight() if squares else 0.0
        times = [sum(n + weight * n * n for n in batch) for batch in batches]
        tokens = [sum(batch) for batch in batches]
        return _step(stages, _relative(times), _relative(tokens), draw)

    return step


def _relative(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value / mean for value in values]


def _step(stages: int, times: Sequence[float], sizes: Sequence[float], draw: random.Random) -> Step:
    """Microbatches of known times and sizes, both 1 on average, and noise."""
    mean = constant(stages, len(times), FORWARD_SECONDS, transfer=TRANSFER_SECONDS)
    held = (tuple(size * ACTIVATION_BYTES for size in sizes),) * stages
    known = replace(mean.scaled([times] * stages, [times] * stages), activation_bytes=held)
    return Step(known, noisy(known, draw))


def _even(stages: int, microbatches: int, seed: int) -> Step:
    return _step(stages, [1.0] * microbatches, [1.0] * microbatches, random.Random(seed))


def _of_job(seed: int) -> random.Random:
    return random.Random(f"job {seed // STEPS}")


def _stage(stages: int, microbatches: int, seed: int) -> Step:
    def slow(workload: Workload) -> Workload:
        rest = [[1.0] * microbatches] * (stages - 1)
        return workload.scaled(
            [*rest, [STAGE_FORWARD] * microbatches], [*rest, [STAGE_BACKWARD] * microbatches]
        )

    even = _even(stages, microbatches, seed)
    return Step(slow(even.known), slow(even.actual))


def _worker(stages: int, microbatches: int, seed: int) -> Step:
    slow, even = _of_job(seed).randrange(stages), _even(stages, microbatches, seed)
    factors = [[WORKER if i == slow else 1.0] * microbatches for i in range(stages)]
    return Step(even.known, even.actual.scaled(factors, factors))


def _link(stages: int, microbatches: int, seed: int) -> Step:
    before, even = _of_job(seed).randrange(stages - 1), _even(stages, microbatches, seed)
    forward, backward = list(even.actual.transfer_forward), list(even.actual.transfer_backward)
    forward[before] = backward[before + 1] = (SLOW_TRANSFER_SECONDS,) * microbatches
    actual = replace(even.actual, transfer_forward=tuple(forward), transfer_backward=tuple(backward))
    return Step(even.known, actual)


def _paused(workload: Workload, at: Mapping[int, int]) -> Workload:
    """With a pause before the forward of one microbatch, by stage."""
    pause = PAUSE * workload.microbatches * 3 * FORWARD_SECONDS
    rows = [list(row) for row in workload.forward]
    for stage, microbatch in at.items():
        rows[stage][microbatch] += pause
    return replace(workload, forward=tuple(map(tuple, rows)))


def _collected(stages: int, microbatches: int, seed: int) -> Step:
    even, at = _even(stages, microbatches, seed), dict.fromkeys(range(stages), microbatches // 2)
    return Step(_paused(even.known, at), _paused(even.actual, at))


def _collecting(stages: int, microbatches: int, seed: int) -> Step:
    even, draw = _even(stages, microbatches, seed), random.Random(f"pause {seed}")
    return Step(even.known, _paused(even.actual, {draw.randrange(stages): draw.randrange(microbatches)}))


def _iid(stages: int, microbatches: int, seed: int) -> Step:
    return varied(stages, microbatches, seed, transfer=TRANSFER_SECONDS)


MEASURED: Mapping[str, Family] = {
    "stage": _stage,
    "worker": _worker,
    "wikipedia": _lengths(lambda draw: [document(draw, WIKIPEDIA, WINDOW)], squares=False),
    "lmsys": _lengths(lambda draw: [document(draw, LMSYS, WINDOW)], squares=False),
    "humps": _lengths(lambda draw: [document(draw, CHATQA2, LONG_WINDOW)], squares=False),
    "points": _lengths(_long_or_short, squares=True),
    "squares": _lengths(lambda draw: _packed(draw, LONG_WINDOW), squares=True),
    "multimodal": FAMILIES["multimodal"],
    "link": _link,
    "collected": _collected,
    "collecting": _collecting,
    "i.i.d.": _iid,
}
UNKNOWN = ("worker", "link", "collecting", "i.i.d.")
SIZES = (8, 16)
"""Stages; four microbatches each."""


@dataclass(frozen=True)
class MeasuredCell(Cell):
    """Steps of one kind; `changed` is its name."""

    def step(self, seed: int) -> Step:
        return MEASURED[self.changed](self.stages, self.microbatches, seed)


CELLS = tuple(MeasuredCell(name, stages=stages) for stages in SIZES for name in MEASURED)

PLANNED = {"planned": Placement(16), "planned-v": Placement(16, 2, "v")}
"""Orders for a step with one chunk a stage, and with two in a V."""

RANKED_PLAN, REFERENCE, BOUND = "ranked:planned", "1f1b", "no order is faster"
RIVALS, OURS = (*FIXED, *PLANNED), (*HINTS, RANKED_PLAN)
EVALUATIONS = 30
"""Simulations for a plan, about ten of them those of its candidates."""


@bench(
    "On variability that was measured, at equal bytes: how far is the best hint from the best rival?",
    minutes="17 *",
    aims="1.01 of the best rival in the worst kind, 0.95 where nobody knew (median); within its bytes",
)
def families(quick: bool = False, seeds: int = 4, jobs: int = 0) -> Found:
    """Twelve kinds of steps, 8 and 16 stages, four microbatches a stage, each with the bytes that 1F1B holds
    on its fullest stage in the same step. Hints are held to these. Rivals: the fixed orders that fit, and
    orders *planned* for the step by simulating what is known of it. One hint ranks by the better of these
    plans: readiness-first where all is known. Beside them is a bound that no order is below."""
    count, rows = 1 if quick else seeds, []
    for cell in CELLS[:3] if quick else CELLS:
        steps = range(0, count, cell.stages // SIZES[0])
        rows.append(row := row_of(cell, side_by_side(partial(measure, cell), steps, jobs)))
        shown = "  ".join(f"{name} {time:.3f}" for name, time in row.times.items())
        say(f"{row.kind:11} {row.stages:3} stages: {row.over_rival:.3f}  {shown}")
    rows.sort(key=lambda row: -row.over_rival)
    said = f"Step times over 1F1B's, medians of {count} steps, on 16 stages of half as many; at 1F1B's bytes."
    parts = ["known", "nobody knew"]
    shown_bars = [
        {"name": f"{r.kind}, {r.stages} stages", "value": r.over_rival, "part": parts[r.kind in UNKNOWN]}
        for r in rows
    ]
    return Found(
        {"rows": [asdict(row) for row in rows]},
        aims(rows),
        {"proof.md families": f"{said}\n\n{markdown(rows)}"},
        {
            "benchmarks/results/images/proof-families.svg": bars(
                shown_bars, "best hint's time over the best rival's", start=1.0
            )
        },
    )


def measure(cell: MeasuredCell, seed: int) -> dict[str, Figures]:
    """Of one step: makespan (s) and bytes over those of 1F1B, by schedule; without what cannot run."""
    step = cell.step(seed)
    found = {name: figures_of(name, step) for name in FIXED}
    unit = found[REFERENCE][1]
    limit = math.ceil(unit)
    if max(map(max, step.actual.activation_bytes or ())) <= limit:
        found |= {name: figures_of(name, step, limit) for name in HINTS}
        plans = {
            name: plan_within(step, limit, replace(at, stages=cell.stages), EVALUATIONS)
            for name, at in PLANNED.items()
        }
        found |= {name: figures_of(own.order, step) for name, own in plans.items()}
        best = min(plans.values(), key=attrgetter("makespan"))
        found[RANKED_PLAN] = figures_of(Ranked(best.order), step, limit)
    placements = Placement(cell.stages), Placement(cell.stages, 2), Placement(cell.stages, 2, "v")
    rules = StepRules(placement=placements[0], microbatches=cell.microbatches, schedule=BF())
    bound = min(
        lower_bound(replace(rules, placement=at), WorkloadCosts(step.actual, at)) for at in placements
    )
    found[BOUND] = bound, unit
    return {name: (seconds, held / unit) for name, (seconds, held) in found.items()}


@dataclass(frozen=True)
class Row:
    """One kind of step with one number of stages: times over 1F1B's by schedule that fits, medians; the
    fastest hint and rival; most bytes that a hint held, over the limit; what no order's time is below."""

    kind: str
    stages: int
    times: Mapping[str, float]
    hint: str
    rival: str
    held: float
    bound: float

    @property
    def over_rival(self) -> float:
        """The best hint's time over that of the best rival that fits."""
        return self.times[self.hint] / self.times[self.rival]

    @property
    def most(self) -> float:
        """The bound over the best rival's time: further ahead nobody can be."""
        return self.bound / self.times[self.rival]


def row_of(cell: MeasuredCell, found: Sequence[dict[str, Figures]]) -> Row:
    """The medians over the steps of a kind."""
    names = [name for name in (*RIVALS, *OURS) if all(name in step for step in found)]
    fits = [name for name in names if name not in FIXED or median(step[name][1] for step in found) <= FITS]
    times = {name: median(step[name][0] / step[REFERENCE][0] for step in found) for name in fits}
    hint, rival = (
        min((name for name in own if name in times), key=times.__getitem__) for own in (OURS, RIVALS)
    )
    held = max(step[name][1] for step in found for name in OURS)
    least = median(step[BOUND][0] / step[REFERENCE][0] for step in found)
    return Row(cell.changed, cell.stages, times, hint, rival, held, least)


def markdown(rows: Sequence[Row]) -> str:
    """The kinds, worst for readiness-first first."""
    heads = ["steps", "stages", "best rival", "", "best hint", "", "hint / rival", "bound / rival"]
    cells = []
    for row in rows:
        times = [text for name in (row.rival, row.hint) for text in (f"`{name}`", f"{row.times[name]:.3f}")]
        kind = f"{row.kind} (unknown)" if row.kind in UNKNOWN else row.kind
        cells.append((kind, row.stages, *times, f"{row.over_rival:.3f}", f"{row.most:.3f}"))
    return table(heads, cells)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Never far behind; ahead where nobody knew."""
    unknown = [row.over_rival for row in rows if row.kind in UNKNOWN]
    return [
        Aim("best hint's time over the best rival's, worst kind", max(r.over_rival for r in rows), 1.01, "x"),
        Aim("the same, median of the kinds that nobody knew", median(unknown), 0.95, "x"),
        Aim("bytes of hints over the limit", max(row.held for row in rows), 1 + 1e-6, "x"),
    ]
