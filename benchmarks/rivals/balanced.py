"""Batches balanced by work: what that gives a fixed order, and what is left for readiness first."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from statistics import fmean, median

from benchmarks.families import CHATQA2, LMSYS, WIKIPEDIA, document, square_weight
from benchmarks.harness import Aim, Found, bench, percent_longer, table
from benchmarks.simulated import FITS
from benchmarks.steps import Figures, figures_of
from rrfp_jax.studies.families import ACTIVATION_BYTES, FORWARD_SECONDS, TRANSFER_SECONDS, Step, noisy
from rrfp_jax.trace.costs import constant

STAGES, MICROBATCHES = 8, 32
SHARES = {"Wikipedia": WIKIPEDIA, "LMsysChat1M": LMSYS, "ChatQA2-Long-SFT": CHATQA2}

WINDOWS = (32 * 1024, 128 * 1024)

FIXED = ("1f1b", "zb-h1", "zb-v")
HINTS = ("bfw", "ranked:zb-h1", "ranked:zb-v")
REFERENCE = FIXED[0]

COMES, BALANCED = "as they come", "balanced"

Batches = Sequence[Sequence[float]]
"""The tokens of every document of every microbatch."""


def as_they_come(shares: Sequence[float], size: int, draw: random.Random) -> Batches:
    """Windows filled one after another, the last document of each cut."""
    found = []
    for _ in range(MICROBATCHES):
        window: list[float] = []
        while (room := size - sum(window)) >= 1:
            window.append(min(room, document(draw, shares, size)))
        found.append(window)
    return found


def work(tokens: float) -> float:
    """What a document takes, in tokens that attend to nothing."""
    return tokens + square_weight() * tokens**2


def evenly(batches: Batches) -> Batches:
    """The same documents in as many microbatches of nearly equal work."""
    found: list[list[float]] = [[] for _ in batches]
    heap = [(0.0, i) for i in range(len(batches))]
    for tokens in sorted(chain.from_iterable(batches), reverse=True):
        load, i = heap[0]
        found[i].append(tokens)
        heapq.heapreplace(heap, (load + work(tokens), i))
    return found


def step_of(batches: Batches, seed: int) -> Step:
    """What is known of them, and what happens; a microbatch takes `FORWARD_SECONDS` in the mean."""
    loads, tokens = [sum(map(work, batch)) for batch in batches], [sum(batch) for batch in batches]
    times = [load / fmean(loads) for load in loads]
    mean = constant(STAGES, len(batches), FORWARD_SECONDS, transfer=TRANSFER_SECONDS)
    held = tuple(size / fmean(tokens) * ACTIVATION_BYTES for size in tokens)
    known = replace(mean.scaled([times] * STAGES, [times] * STAGES), activation_bytes=(held,) * STAGES)
    return Step(known, noisy(known, random.Random(seed)))


@dataclass(frozen=True)
class Row:
    """The steps of one kind of lengths and window, packed in one way; medians over the seeds: work of the
    heaviest microbatch over the mean; bytes of 1F1B over those as they come; times by schedule that fits,
    over those of 1F1B as they come."""

    lengths: str
    window: int
    packed: str
    spread: float
    held: float
    times: Mapping[str, float]

    @property
    def behind(self) -> float:
        """By how much longer the best hint takes than the best fixed order that fits (%)."""
        hint, fixed = (min(self.times[name] for name in of if name in self.times) for of in (HINTS, FIXED))
        return percent_longer(hint, fixed)


Packed = tuple[float, Mapping[str, Figures]]
"""A step packed in one way: the spread, see `Row`; seconds and bytes, by schedule."""


def _packed(batches: Batches, seed: int) -> Packed:
    loads = [sum(map(work, batch)) for batch in batches]
    step = step_of(batches, seed)
    found = {name: figures_of(name, step) for name in FIXED}
    limit = math.ceil(found[REFERENCE][1])
    return max(loads) / fmean(loads), found | {name: figures_of(name, step, limit) for name in HINTS}


def _row(lengths: str, window: int, packed: str, steps: Sequence[Packed], come: Sequence[Packed]) -> Row:
    own, base = [figures for _, figures in steps], [figures[REFERENCE] for _, figures in come]
    fits = [name for name in own[0] if median(step[name][1] / step[REFERENCE][1] for step in own) <= FITS]
    times = {
        name: median(step[name][0] / unit for step, (unit, _) in zip(own, base, strict=True)) for name in fits
    }
    held = median(step[REFERENCE][1] / of for step, (_, of) in zip(own, base, strict=True))
    return Row(lengths, window, packed, median(spread for spread, _ in steps), held, times)


def _shown(rows: Sequence[Row]) -> str:
    """All kinds; a dash where more bytes are held."""
    names, cells = (*FIXED, *HINTS), []
    for row in rows:
        times = [f"{row.times[name]:.3f}" if name in row.times else "-" for name in names]
        kind = f"{row.lengths}, {row.window // 1024}K"
        cells.append((kind, row.packed, f"{row.spread:.2f}", f"{row.held:.2f}", *times))
    return table(["lengths", "packed", "heaviest", "1F1B's bytes", *names], cells)


@bench(
    "Batches balanced by work: what do they give a fixed order, and what is left for readiness first?",
    minutes="1",
    aims="the best hint 1 % behind the best fixed order at worst",
)
def balanced(seeds: int = 8) -> Found:
    """Simulated: 8 stages, 32 microbatches, the documents of a step drawn from published shares of lengths
    (`families.py`) and cut at the window. *As they come*: each microbatch takes what comes next, until a
    window is full. *Balanced*: the same documents, those of most work first, each to the microbatch that has
    least of it (as WLB-LLM, OSDI'25, packs by work, without its putting off of outliers). Work goes with
    tokens and, as in an 8B model, their squares; bytes go with tokens; noise of 2 % a task. Hints are held to
    the bytes that 1F1B holds on the same microbatches, and fixed orders count where they hold no more, in the
    median."""
    rows = []
    for (lengths, shares), window in product(SHARES.items(), WINDOWS):
        come, evened = [], []
        for seed in range(seeds):
            batches = as_they_come(shares, window, random.Random(seed))
            come.append(_packed(batches, seed))
            evened.append(_packed(evenly(batches), seed))
        rows += [_row(lengths, window, name, own, come) for name, own in ((COMES, come), (BALANCED, evened))]
    worst = max(rows, key=lambda row: row.behind)
    where = f"{worst.lengths}, {worst.window // 1024}K, {worst.packed}"
    return Found(
        {"rows": [asdict(row) for row in rows]},
        [Aim(f"best hint behind the best fixed order, worst ({where})", worst.behind, 1.0, "%")],
        {"rivals.md balanced": _shown(rows)},
    )
