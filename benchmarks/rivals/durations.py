"""The same durations under PyTorch's schedules and ours, in processes, with real messages, in turns.

    python -m benchmarks.rivals.durations [--json=FILE] [--check] [--quick] [--seeds=3] [--write]

8 stages, 32 microbatches, forwards of 30 ms, backwards twice as long (log-normal, sd 0.3, half of the
variance common to all tasks of a microbatch), half of that where a stage has two chunks; messages of 64 KiB.
Devices stand in for accelerators on both sides (results/rivals.md). A step is what passes from the start of
its first task to the end of its last one, over all stages. Per seed everybody runs 4 steps, PyTorch first;
figures are means over the seeds of the median step. Beside it stands what the tasks would take in the order
in which they ran if messages were free: what is beyond that, messages and waiting for them cost.

Who may hold 32 microbatches is compared with whoever holds no more, and at equal bytes who holds no more than
1F1B does, 8; what was held is told from what ran. `planned` is told all durations beforehand, so it is
shown, and is not in the aims. Nor are the orders by PipeMorph's rule (`slackness.py`), made for the means of
each stage and followed strictly by our runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.harness import RESULTS, Aim, finish, parse, percent_longer, put_figures, table
from benchmarks.rivals.environment import require_torch, torch_finds
from benchmarks.rivals.found import Found, found_in
from benchmarks.rivals.slackness import adapted, measured
from benchmarks.runtime.paced import STEPS, run_paced
from rrfp_jax.core.schedules import write_csv
from rrfp_jax.trace.costs import Workload, log_normal

PAGE = RESULTS / "rivals.md"

STAGES, MICROBATCHES, SECONDS = 8, 32, 0.030
QUICK = (2, 4, 0.010)

THEIRS = ("1f1b", "interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe-v")
FIXED = ("1f1b", "zb-h1", "zb-v")
HINTS = ("bf", "bfw", "ranked:zb-v", "planned")
"""These run within either limit, with as many chunks a stage as they say; one of them also with more:"""
CHUNKED, CHUNKS = "bfw", 2

TORCH, OURS, TOLD, RULE = "torch", "ours", "told beforehand", "pipemorph's rule"


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        system: `TORCH`; `OURS`, or `TOLD` for those of ours that know the durations; `RULE`, run by ours.
        limit: most microbatches that it was allowed to hold; 0 if its order says it.
        by_seed: what was found.
    """

    system: str
    schedule: str
    limit: int
    by_seed: tuple[Found, ...]

    @property
    def step(self) -> float:
        """Mean over the seeds (s)."""
        return fmean(found.step for found in self.by_seed)

    @property
    def order(self) -> float:
        """The same of the order alone (s)."""
        return fmean(found.order for found in self.by_seed)

    @property
    def held(self) -> float:
        """Most microbatches, whatever the seed."""
        return max(found.held for found in self.by_seed)

    @property
    def name(self) -> str:
        """With its limit."""
        return f"{self.schedule}, limit {self.limit}" if self.limit else self.schedule

    def __str__(self) -> str:
        took = f"{self.step:.4f} s, its order alone {self.order:.4f} s"
        return f"{self.system} {self.name}: {took}, held {self.held:g}"


def theirs(workload: Workload) -> Iterator[Row]:
    """PyTorch's schedules on one step."""
    asked = {"workload": workload.as_json_object(), "schedules": THEIRS, "steps": STEPS}
    for name, found in torch_finds("torch_durations", asked).items():
        yield Row(TORCH, name, 0, (Found(**found),))


def ours(workload: Workload) -> Iterator[Row]:
    """Ours on the same step."""
    stages, count = workload.stages, workload.microbatches
    cases = [(name, 0, 1) for name in FIXED] + [(name, n, 1) for name in HINTS for n in (stages, count)]
    for name, limit, chunks in [*cases, (CHUNKED, stages, CHUNKS), (CHUNKED, count, CHUNKS)]:
        more = {"mesh.chunks": chunks} if chunks > 1 else {}
        ran = run_paced(workload, name, limit or stages, STEPS, more)
        system = TOLD if name.startswith("planned") else OURS
        title = f"{name}, {chunks} chunks" if more else name
        yield Row(system, title, limit, (found_in([step.recorded.trace for step in ran], workload),))


def by_rule(workload: Workload) -> Iterator[Row]:
    """What PipeMorph's rule makes of the stages' means, on the same step."""
    for limit in (workload.stages, workload.microbatches):
        order = adapted(measured(workload), limit)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "order.csv"
            file.write_text(write_csv(order, order.placement, order.microbatches), encoding="utf-8")
            ran = run_paced(workload, f"csv:{file}", limit, STEPS)
        yield Row(RULE, "strict", limit, (found_in([step.recorded.trace for step in ran], workload),))


def joined(rows: Sequence[Row]) -> Row:
    """One schedule's rows of single seeds as one."""
    return replace(rows[0], by_seed=tuple(chain.from_iterable(row.by_seed for row in rows)))


def best(rows: Sequence[Row], system: str, most: float) -> Row:
    """The fastest of a system that holds no more."""
    return min((r for r in rows if r.system == system and r.held <= most), key=lambda row: row.step)


def aims_of(rows: Sequence[Row], stages: int, microbatches: int) -> list[Aim]:
    """How far ahead ours must be."""
    aims = []
    limits = ((f"{microbatches} in flight", microbatches, 10), ("equal bytes", stages, 2))
    for label, most, least in limits:
        them, us = best(rows, TORCH, most), best(rows, OURS, most)
        name = f"{label}: torch's best ({them.name}) longer than ours ({us.name})"
        aims.append(Aim(name, percent_longer(them.step, us.step), least, "%", at_least=True))
    them, us = (next(r for r in rows if (r.system, r.schedule) == (s, "1f1b")) for s in (TORCH, OURS))
    behind = percent_longer(us.step, them.step)
    aims.append(Aim("1F1B, ours longer than torch's", behind, 0.0, "%"))
    aims.append(Aim("1F1B, difference of ours and torch's", abs(behind), 3.0, "%"))
    return aims


def markdown(rows: Sequence[Row], stages: int, microbatches: int) -> str:
    """All rows, the fastest first, beside the best of PyTorch's that hold no more than the same limit."""
    cells = []
    for row in sorted(rows, key=lambda row: row.step):
        most = stages if row.held <= stages else microbatches
        share = f"{row.step / best(rows, TORCH, most).step:.3f}"
        cells.append((row.system, row.name, f"{row.step:.3f}", f"{row.order:.3f}", f"{row.held:g}", share))
    return table(["", "schedule", "step, s", "its order alone", "held", "of torch's best"], cells)


def main() -> int:
    """Run everybody, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="2 stages, 4 microbatches, 10 ms, 1 seed")
    parser.add_argument("--write", action="store_true", help="the table into results/rivals.md")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="steps (3)")
    options = parser.parse_args()
    require_torch()
    stages, count, seconds = QUICK if options.quick else (STAGES, MICROBATCHES, SECONDS)
    found: dict[tuple[str, str, int], list[Row]] = {}
    for seed in range(1, 2 if options.quick else options.seeds + 1):
        workload = log_normal(stages, count, forward=seconds, sigma=0.3, shared=0.5, seed=seed)
        for runs in (theirs, ours, by_rule):
            for row in runs(workload):
                print(f"seed {seed}: {row}", flush=True)
                found.setdefault((row.system, row.schedule, row.limit), []).append(row)
    rows = [joined(own) for own in found.values()]
    shown = markdown(rows, stages, count)
    print(shown)
    if options.write:
        put_figures(PAGE, "same durations", f"\n{shown}\n\n")
    return finish(options, {"rows": [asdict(row) for row in rows]}, aims_of(rows, stages, count))


if __name__ == "__main__":
    sys.exit(main())
