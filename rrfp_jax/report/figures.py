"""What a frame shows of the latest step, as numbers: rows of stages, and who is slowest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from rrfp_jax.json_files import Unreadable
from rrfp_jax.report.store import StepLine, read_steps
from rrfp_jax.trace.idleness import StageTime, stage_times
from rrfp_jax.trace.records import StepTrace

COMPUTE, DELAYED = "compute", "delayed"
"""Of `StageTime.seconds`, in both of which a device is busy."""

SLOWER = 1.05
"""So many times the others' time is worth a name: less is the clocks'."""


class Edge(NamedTuple):
    """Messages from a stage to another: seconds from a task's end until its receiver is ready."""

    source: int
    target: int
    messages: int
    median: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class LatestStep:
    """A step, of the replica that ended last; what takes long to find, with many tasks, is found once."""

    trace: StepTrace
    fixed_order: bool
    grouped: bool
    ranks: Sequence[Sequence[int]]  # per replica and stage, one after the other

    @cached_property
    def times(self) -> Sequence[StageTime]:
        """How each stage spent the step."""
        return stage_times(self.trace, self.fixed_order, self.grouped)

    @cached_property
    def edges(self) -> Sequence[Edge]:
        """Edges between stages, those first whose messages take longest in the median."""
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for message in self.trace.transfers():
            found[message.sender.stage, message.receiver.stage].append(message.seconds)
        edges = [Edge(*between, len(own), median(own), max(own)) for between, own in found.items()]
        return sorted(edges, key=lambda edge: (-edge.median, edge.source, edge.target))


def read_latest(path: Path) -> LatestStep:
    """The step in a file that `StepFile` wrote; `Unreadable` if it is something else."""
    steps = [step for group in read_steps(path).values() for step in group]
    if len(steps) != 1 or not steps[0].ranks:
        raise Unreadable(f"{path} has {len(steps)} steps, not one with its ranks")
    (recorded, fixed_order, ranks), *_ = steps
    return LatestStep(trace=recorded.trace, fixed_order=fixed_order, grouped=recorded.grouped, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """A stage, or the mean of several.

    Attributes:
        name: its number, or how many they are.
        ranks: of its processes.
        seconds: that it was busy.
        shares: of the step, by what it did, as `StageTime.seconds` has that; they add up to 1.
        peak: the most bytes that it held for microbatches, of any replica; None if that is not known.
        budget: of these bytes; None if there is no limit.
    """

    name: str
    ranks: Sequence[int]
    seconds: float
    shares: Mapping[str, float]
    peak: float | None = None
    budget: float | None = None

    @property
    def busy(self) -> float:
        """The share of the step in which it was."""
        return self.shares[COMPUTE] + self.shares[DELAYED]


class Slowest(NamedTuple):
    """The stage replica that was busy longest in some steps, and how many times as long as others.

    `beside` is against the same stage in other replicas, None if there are none.
    """

    stage: int
    replica: int
    replicas: int
    ranks: Sequence[int]
    steps: int
    ratio: float
    beside: float | None


def rows_of(latest: LatestStep, line: StepLine | None) -> list[StageRow]:
    """The stages of the replica that ended last, in order.

    Args:
        latest: the step.
        line: of the latest step, which may be a later one; for bytes.
    """
    stages = latest.trace.stages
    first = latest.trace.replica * stages
    peaks = line.peak_bytes if line is not None and len(line.peak_bytes) == stages else [None] * stages
    budgets = line.budget_bytes if line is not None and len(line.budget_bytes) == stages else [None] * stages
    rows = []
    for stage, time in enumerate(latest.times):
        rows.append(
            StageRow(
                name=str(stage),
                ranks=latest.ranks[first + stage],
                seconds=time.compute + time.delayed,
                shares={n: own / time.total if time.total else 0.0 for n, own in time.seconds.items()},
                peak=peaks[stage],
                budget=budgets[stage],
            )
        )
    return rows


def summarised(rows: Sequence[StageRow], most: int) -> list[StageRow]:
    """At most so many rows, at least two: the stages that are busy longest, in order; the others' mean."""
    if len(rows) <= most:
        return list(rows)
    slowest = sorted(range(len(rows)), key=lambda at: (-rows[at].seconds, at))[: most - 1]
    others = [row for at, row in enumerate(rows) if at not in slowest]
    names = list(rows[0].shares)
    peaks = [row.peak for row in others if row.peak is not None]
    budgets = [row.budget for row in others if row.budget is not None]
    mean = StageRow(
        name=f"{len(others)} more",
        ranks=(),
        seconds=fmean(row.seconds for row in others),
        shares={name: fmean(row.shares[name] for row in others) for name in names},
        peak=fmean(peaks) if peaks else None,
        budget=fmean(budgets) if budgets else None,
    )
    return [rows[at] for at in sorted(slowest)] + [mean]


def slowest_of(latest: LatestStep, busy: Sequence[Sequence[Sequence[float]]]) -> Slowest | None:
    """The stage replica that was busy longest; None if it is alone, or no more than a little slower.

    Args:
        latest: the latest step.
        busy: of it and of steps before it, per replica and stage (s); of other numbers of them: passed over.
    """
    replicas, stages = len(latest.trace.busy_seconds), latest.trace.stages
    like = [step for step in busy if [len(row) for row in step] == [stages] * replicas]
    flat = [fmean(step[n // stages][n % stages] for step in like) for n in range(replicas * stages)]
    at = flat.index(max(flat))
    others = flat[:at] + flat[at + 1 :]
    if not others or not median(others) or flat[at] < SLOWER * median(others):
        return None
    replica, stage = divmod(at, stages)
    alike = [seconds for n, seconds in enumerate(flat) if n % stages == stage and n != at]
    return Slowest(
        stage=stage,
        replica=replica,
        replicas=replicas,
        ranks=latest.ranks[at],
        steps=len(like),
        ratio=flat[at] / median(others),
        beside=flat[at] / median(alike) if alike and median(alike) else None,
    )
