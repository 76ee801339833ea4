"""The same durations under PyTorch's schedules and ours, in processes, with real messages, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.harness import Aim, Found, bench, percent_longer, say, table
from benchmarks.orders import write_csv
from benchmarks.paced import STEPS, run_paced
from benchmarks.rivals.common import Timed, require_torch, timed, torch_finds
from benchmarks.rivals.slow_link import adapted, means
from rrfp_jax.trace.costs import Workload, log_normal

THEIRS = ("1f1b", "interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe-v")
FIXED = ("1f1b", "zb-h1", "zb-v")
HINTS = ("bf", "bfw", "ranked:zb-v", "planned")
"""These run within either limit, with as many chunks a stage as they say; one of them also with more:"""
CHUNKED, CHUNKS = "bfw", 2

TORCH, OURS, TOLD, RULE = "torch", "ours", "told beforehand", "pipemorph's rule"
"""Systems; `TOLD` are those of ours that know the durations, `RULE` is run by ours."""


@dataclass(frozen=True)
class Row:
    """One schedule of a system; `limit` microbatches was it allowed to hold, 0 if its order says it."""

    system: str
    schedule: str
    limit: int
    by_seed: tuple[Timed, ...]

    @property
    def step(self) -> float:
        return fmean(found.step for found in self.by_seed)

    @property
    def order(self) -> float:
        return fmean(found.order for found in self.by_seed)

    @property
    def held(self) -> float:
        """Most microbatches, whatever the seed."""
        return max(found.held for found in self.by_seed)

    @property
    def name(self) -> str:
        return f"{self.schedule}, limit {self.limit}" if self.limit else self.schedule


def _everybody(workload: Workload) -> Iterator[Row]:
    """All on one step: PyTorch's schedules, ours, and what PipeMorph's rule makes of the stages' means."""
    asked = {"workload": workload.as_json_object(), "schedules": THEIRS, "steps": STEPS}
    for name, found in torch_finds("durations", asked).items():
        yield Row(TORCH, name, 0, (Timed(**found),))
    stages, count = workload.stages, workload.microbatches

    def ran(name: str, limit: int, chunks: int = 1) -> tuple[Timed, ...]:
        more = {"mesh.chunks": chunks} if chunks > 1 else {}
        steps = run_paced(workload, name, limit, STEPS, more)
        return (timed([step.recorded.trace for step in steps], workload),)

    for name in FIXED:
        yield Row(OURS, name, 0, ran(name, stages))
    for limit in (stages, count):
        for name in HINTS:
            yield Row(TOLD if name == "planned" else OURS, name, limit, ran(name, limit))
        yield Row(OURS, f"{CHUNKED}, {CHUNKS} chunks", limit, ran(CHUNKED, limit, CHUNKS))
        order = adapted(means(workload), limit)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "order.csv"
            file.write_text(write_csv(order, order.placement, order.microbatches), encoding="utf-8")
            yield Row(RULE, "strict", limit, ran(f"csv:{file}", limit))


def joined(rows: Sequence[Row]) -> Row:
    """One schedule's rows of single seeds as one."""
    return replace(rows[0], by_seed=tuple(chain.from_iterable(row.by_seed for row in rows)))


def best(rows: Sequence[Row], system: str, most: float) -> Row:
    """The fastest of a system that holds no more."""
    return min((r for r in rows if r.system == system and r.held <= most), key=lambda row: row.step)


def aims_of(rows: Sequence[Row], stages: int, microbatches: int) -> list[Aim]:
    """How far ahead ours must be; `TOLD` and `RULE` are shown alone."""
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


@bench(
    "The same durations: which of PyTorch's schedules and of ours is fastest, in flight and at equal bytes?",
    minutes="15 a seed *",
    aims="torch's best 10 % longer with 32 in flight, 2 % at equal bytes; 1F1B not longer, within 3 %",
)
def durations(quick: bool = False, seeds: int = 3) -> Found:
    """8 stages, 32 microbatches, forwards of 30 ms (log-normal, half of the variance common to all tasks of a
    microbatch), half of that where a stage has two chunks; messages of 64 KiB. Devices stand in for
    accelerators on both sides (results/rivals.md). Per seed everybody runs 4 steps, PyTorch first; figures
    are means over the seeds of the median step. Beside it stands what the tasks would take in the order in
    which they ran if messages were free. Who may hold 32 microbatches is compared with whoever holds no more,
    and at equal bytes who holds no more than 1F1B does, 8; what was held is told from what ran."""
    require_torch()
    stages, count, seconds = (2, 4, 0.010) if quick else (8, 32, 0.030)
    found: dict[tuple[str, str, int], list[Row]] = {}
    for seed in range(1, 2 if quick else seeds + 1):
        workload = log_normal(stages, count, forward=seconds, sigma=0.3, shared=0.5, seed=seed)
        for row in _everybody(workload):
            say(f"seed {seed}: {row}")
            found.setdefault((row.system, row.schedule, row.limit), []).append(row)
    rows = [joined(own) for own in found.values()]
    return Found(
        {"rows": [asdict(row) for row in rows]},
        aims_of(rows, stages, count),
        {"rivals.md same durations": markdown(rows, stages, count)},
    )
