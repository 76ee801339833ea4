"""Batches balanced by work: what that gives a fixed order, and what is left for readiness first.

    python -m benchmarks.rivals.balanced [--json=FILE] [--check] [--write] [--seeds=8]

Simulated: 8 stages, 32 microbatches, the documents of a step drawn from published shares of lengths
(`benchmarks/studies/measured.py`) and cut at the window. *As they come*: each microbatch takes what comes
next, until a window is full. *Balanced*: the same documents, those of most work first, each to the microbatch
that has least of it (as WLB-LLM, OSDI'25, packs by work, without its putting off of outliers). Work goes with
tokens and, as in an 8B model, their squares; bytes go with tokens; noise of 2 % a task. Hints are held to the
bytes that 1F1B holds on the same microbatches, and fixed orders count where they hold no more, in the median.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from statistics import fmean, median

from benchmarks.harness import RESULTS, Aim, finish, parse, percent_longer, put_figures, table
from benchmarks.studies.measured import (
    CHATQA2,
    LMSYS,
    WIKIPEDIA,
    document,
    square_weight,
)
from benchmarks.studies.simulated import FITS, Figures, figures_of
from rrfp_jax.core.schedules import by_name
from rrfp_jax.sim.families import ACTIVATION_BYTES, FORWARD_SECONDS, TRANSFER_SECONDS, Step, noisy
from rrfp_jax.trace.costs import constant

PAGE = RESULTS / "rivals.md"

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


def balanced(batches: Batches) -> Batches:
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
    """The steps of one kind of lengths and window, packed in one way; medians over the seeds.

    Attributes:
        spread: work of the heaviest microbatch over the mean.
        held: bytes of 1F1B over those as they come.
        times: by schedule that fits, over those of 1F1B as they come.
    """

    lengths: str
    window: int
    packed: str
    spread: float
    held: float
    times: Mapping[str, float]

    def best(self, names: Sequence[str]) -> str:
        """The fastest of some schedules."""
        return min((name for name in names if name in self.times), key=self.times.__getitem__)

    @property
    def behind(self) -> float:
        """By how much longer the best hint takes than the best fixed order that fits (%)."""
        return percent_longer(self.times[self.best(HINTS)], self.times[self.best(FIXED)])


@dataclass(frozen=True)
class Packed:
    """One step, packed in one way.

    Attributes:
        spread: see `Row`.
        figures: seconds and bytes, by schedule.
    """

    spread: float
    figures: Mapping[str, Figures]

    @classmethod
    def of(cls, batches: Batches, seed: int) -> Packed:
        """Everybody's."""
        loads = [sum(map(work, batch)) for batch in batches]
        step = step_of(batches, seed)
        found = {name: figures_of(by_name(name), step) for name in FIXED}
        limit = math.ceil(found[REFERENCE][1])
        hints = {name: figures_of(by_name(name), step, limit) for name in HINTS}
        return cls(max(loads) / fmean(loads), found | hints)

    def over(self, other: Packed) -> tuple[dict[str, float], float]:
        """Seconds by schedule, and 1F1B's bytes, over those of 1F1B in another packing."""
        unit, held = other.figures[REFERENCE]
        times = {name: seconds / unit for name, (seconds, _) in self.figures.items()}
        return times, self.figures[REFERENCE][1] / held


def rows(seeds: int) -> Iterator[Row]:
    """All kinds."""
    for (lengths, shares), window in product(SHARES.items(), WINDOWS):
        come, evened = [], []
        for seed in range(seeds):
            batches = as_they_come(shares, window, random.Random(seed))
            come.append(Packed.of(batches, seed))
            evened.append(Packed.of(balanced(batches), seed))
        for name, steps in ((COMES, come), (BALANCED, evened)):
            yield _row(lengths, window, name, steps, come)


def _row(lengths: str, window: int, packed: str, steps: Sequence[Packed], come: Sequence[Packed]) -> Row:
    over = [step.over(other) for step, other in zip(steps, come, strict=True)]
    fits = [
        name
        for name in steps[0].figures
        if median(step.figures[name][1] / step.figures[REFERENCE][1] for step in steps) <= FITS
    ]
    times = {name: median(own[name] for own, _ in over) for name in fits}
    spread = median(step.spread for step in steps)
    return Row(lengths, window, packed, spread, median(held for _, held in over), times)


def markdown(found: Sequence[Row]) -> str:
    """All kinds; a dash where more bytes are held."""
    names = (*FIXED, *HINTS)
    cells = []
    for row in found:
        times = [f"{row.times[name]:.3f}" if name in row.times else "-" for name in names]
        kind = f"{row.lengths}, {row.window // 1024}K"
        cells.append((kind, row.packed, f"{row.spread:.2f}", f"{row.held:.2f}", *times))
    return table(["lengths", "packed", "heaviest", "1F1B's bytes", *names], cells)


def main() -> int:
    """Simulate, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--write", action="store_true", help="the table into results/rivals.md")
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="steps of each kind (8)")
    options = parser.parse_args()
    found = list(rows(options.seeds))
    print(shown := markdown(found))
    if options.write:
        put_figures(PAGE, "balanced", f"\n{shown}\n\n")
    worst = max(found, key=lambda row: row.behind)
    where = f"{worst.lengths}, {worst.window // 1024}K, {worst.packed}"
    aims = [Aim(f"best hint behind the best fixed order, worst ({where})", worst.behind, 1.0, "%")]
    return finish(options, {"rows": [asdict(row) for row in found]}, aims)


if __name__ == "__main__":
    sys.exit(main())
