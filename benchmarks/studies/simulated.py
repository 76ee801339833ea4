"""Readiness-first against its rivals in the simulator: `docs/simulated.md`.

    python -m benchmarks.studies.simulated [--json=FILE] [--check] [--quick] [--write] [--seeds=20]

20 cells, each at two memories. One cell is the base: 8 stages, 32 microbatches, log-normal durations of sd
0.3 (half of the variance is the microbatch's), transfers of a tenth of a forward. The others change one thing
each: stages, microbatches per stage, sd, transfers, or the family. Every schedule gets the same steps (paired
seeds).

limit 32       hints and plans may have 32 microbatches in flight on a stage, as in the paper
equal bytes    hints and plans may hold what 1F1B holds on its largest stage in the same step

`planned` is the best of all schedules under the same limit, improved by simulating what is known of the step.
`--write` puts the tables into docs/simulated.md and the plot beside it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import SIMULATED, Aim, finish, parse, put_figures
from rrfp_jax.commands.simulation import PLANNED
from rrfp_jax.core.schedules import Schedule, by_name
from rrfp_jax.sim.compare import Outcome, Settings, compare
from rrfp_jax.sim.families import FAMILIES, FORWARD_SECONDS, Step, varied

RIVALS = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", PLANNED)
READINESS_FIRST = ("bf", "bfw")
LIMIT = 32
MEMORIES = ("equal bytes", "limit 32")

STAGES, PER_STAGE, SIGMA, TRANSFER = 8, 4, 0.3, 0.1

EVALUATIONS, FEWEST = 100, 12
PLANNED_TASKS = 150_000
"""A planner simulates a step 100 times, fewer times if these would be more tasks; all candidates at least."""


@dataclass(frozen=True)
class Cell:
    """What is simulated; transfers in forwards, `per_stage` microbatches per stage."""

    changed: str
    stages: int = STAGES
    per_stage: int = PER_STAGE
    sigma: float = SIGMA
    transfer: float = TRANSFER
    family: str | None = None

    def step(self, seed: int) -> Step:
        """One of its steps."""
        microbatches = self.stages * self.per_stage
        if self.family is not None:
            return FAMILIES[self.family](self.stages, microbatches, seed)
        transfer = self.transfer * FORWARD_SECONDS
        return varied(self.stages, microbatches, seed, sigma=self.sigma, transfer=transfer)


CELLS = (
    Cell("base"),
    *(Cell(f"{n} stages", stages=n) for n in (4, 16, 32, 64)),
    *(Cell(f"{n} a stage", per_stage=n) for n in (1, 2, 8)),
    *(Cell(f"sd {sigma:g}", sigma=sigma) for sigma in (0.0, 0.15, 0.45, 0.6)),
    *(Cell(f"transfers {part:g}", transfer=part) for part in (0.0, 0.3, 1.0)),
    *(Cell(name, family=name) for name in FAMILIES if name not in ("constant", "log-normal")),
)


def measure(cell: Cell, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Of one step, by memory and schedule: makespan and bound (s), bytes on the largest stage."""
    step = cell.step(seed)
    tasks = 2 * cell.stages * cell.stages * cell.per_stage
    evaluations = min(EVALUATIONS, max(FEWEST, PLANNED_TASKS // tasks))
    settings = Settings(limit=LIMIT, evaluations=evaluations)
    fixed = compare({name: by_name(name) for name in RIVALS if name != PLANNED}, [step], settings)
    bytes_of_1f1b = fixed["1f1b"].bytes
    assert bytes_of_1f1b is not None
    memories = {
        "equal bytes": replace(settings, limit=None, byte_limit=math.ceil(bytes_of_1f1b)),
        "limit 32": settings,
    }
    ours: dict[str, Schedule | None] = {PLANNED: None, **{name: by_name(name) for name in READINESS_FIRST}}
    found = {}
    for memory, given in memories.items():
        hints = compare(ours, [step], given)
        found[memory] = {name: _figures(outcome) for name, outcome in (fixed | hints).items()}
    return found


def _figures(outcome: Outcome) -> dict[str, float]:
    return {
        "makespan": outcome.makespan,
        "bound": outcome.bounds[0],
        "bytes": outcome.bytes or 0.0,
    }


@dataclass(frozen=True)
class Row:
    """One cell at one memory, medians over the seeds.

    Attributes:
        times: makespan over the bound of one chunk a stage, by schedule.
        bytes: on the largest stage over that of 1F1B, by schedule.
        rival: of the fixed orders and plans, the shortest in the median.
        gain: the rival's makespan over BFW's.
    """

    cell: str
    times: Mapping[str, float]
    bytes: Mapping[str, float]
    rival: str
    gain: float


def row_of(cell: Cell, memory: str, found: Sequence[dict[str, dict[str, dict[str, float]]]]) -> Row:
    """The medians of a cell at one memory; a rival counts if it holds no more than is allowed."""
    steps = [step[memory] for step in found]
    names = (*RIVALS, *READINESS_FIRST)

    def over(name: str, figure: str, other: str, its: str) -> float:
        return median(step[name][figure] / step[other][its] for step in steps)

    times = {name: over(name, "makespan", "1f1b", "bound") for name in names}
    held = {name: over(name, "bytes", "1f1b", "bytes") for name in names}
    fair = [name for name in RIVALS if memory != "equal bytes" or held[name] < 1.001]
    rival = min(fair, key=times.__getitem__)
    return Row(cell.changed, times, held, rival, over(rival, "makespan", "bfw", "makespan"))


def markdown(rows: Sequence[Row]) -> str:
    """A table for the docs."""
    names = (*RIVALS, *READINESS_FIRST)
    lines = [f"| | {' | '.join(names)} | best rival | its time over BFW's |", "|---" * (len(names) + 3) + "|"]
    for row in rows:
        best = min(row.times.values())
        cells = [_bold(f"{row.times[name]:.3f}", row.times[name] == best) for name in names]
        lines.append(f"| {row.cell} | {' | '.join(cells)} | {row.rival} | {row.gain:.3f} |")
    return "\n".join(lines)


def _bold(text: str, chosen: bool) -> str:
    return f"**{text}**" if chosen else text


def plot(rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """The sweep over variability at equal bytes: every schedule's time over the bound."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    spread = {"base": SIGMA, **{cell.changed: cell.sigma for cell in CELLS if cell.changed.startswith("sd")}}
    chosen = sorted((row for row in rows["equal bytes"] if row.cell in spread), key=lambda r: spread[r.cell])
    at = [spread[row.cell] for row in chosen]
    for name in (*RIVALS, *READINESS_FIRST):
        ours = name in READINESS_FIRST
        held = max(row.bytes[name] for row in chosen)
        label = name if held < 1.001 else f"{name} ({held:.1f} x the memory)"
        width, dashes = (2.5, "-") if ours else (1.2, "--")
        axes.plot(at, [row.times[name] for row in chosen], label=label, linewidth=width, linestyle=dashes)
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    axes.annotate(
        "no order is below this", (at[-1], 1.0), ha="right", va="bottom", fontsize=8, color="#666666"
    )
    axes.set_xlabel("variability: standard deviation of the logarithm of durations")
    axes.set_ylabel("step time / lower bound")
    axes.set_title("8 stages, 32 microbatches, the memory of 1F1B", fontsize=11)
    axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def write(rows: Mapping[str, Sequence[Row]], seeds: int) -> None:
    """Put the tables into docs/simulated.md and the plot beside it."""
    tables = "".join(f"\n## {memory.capitalize()}\n\n{markdown(rows[memory])}\n" for memory in MEMORIES)
    note = f"\nMedians of {seeds} paired seeds; makespan over the lower bound of one chunk a stage.\n"
    put_figures(SIMULATED, "figures", f"{note}{tables}\n")
    plot(rows, SIMULATED.parent / "images" / "simulated.svg")


def main() -> int:
    """Run all cells, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="two small cells, three seeds")
    parser.add_argument("--write", action="store_true", help="tables and plot into docs/")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="steps of each cell (20)")
    options = parser.parse_args()
    cells = [Cell("4 stages", stages=4), Cell("1 a stage", per_stage=1)] if options.quick else CELLS
    seeds = range(3 if options.quick else options.seeds)
    rows: dict[str, list[Row]] = {memory: [] for memory in MEMORIES}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for cell in cells:
            found = list(pool.map(partial(measure, cell), seeds))
            for memory in MEMORIES:
                rows[memory].append(row := row_of(cell, memory, found))
                shown = "  ".join(f"{name} {time:.3f}" for name, time in row.times.items())
                print(f"{cell.changed:18} {memory:12} {shown}  best rival {row.rival}", flush=True)
    if options.write:
        write(rows, len(seeds))
    return finish(
        options, {memory: [vars(row) for row in found] for memory, found in rows.items()}, aims(rows)
    )


def aims(rows: Mapping[str, Sequence[Row]]) -> list[Aim]:
    """What must hold whatever the figures are: nothing beats the bound, memory is kept."""
    one_chunk = ("1f1b", "zb-h1", PLANNED, *READINESS_FIRST)
    lowest = min(row.times[name] for found in rows.values() for row in found for name in one_chunk)
    most = max(row.bytes[name] for row in rows["equal bytes"] for name in (PLANNED, *READINESS_FIRST))
    return [
        Aim("lower bound over the shortest makespan", 1 / lowest, 1.0 + 1e-9, "x"),
        Aim("bytes of hints and plans over 1F1B's", most, 1.0 + 1e-9, "x"),
    ]


if __name__ == "__main__":
    sys.exit(main())
