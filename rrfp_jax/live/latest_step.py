"""The latest step of a run as whoever looks at it has it: what happened, and what follows from that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

from rrfp_jax.trace.idleness import StageTime, stage_times
from rrfp_jax.trace.records import StepTrace


class Edge(NamedTuple):
    """Messages from a stage to another: seconds from a task's end until its receiver is ready."""

    source: int
    target: int
    messages: int
    median: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class LatestStep:
    """A step. What takes long to find, with many tasks, is found once.

    Attributes:
        trace: of the replica that ended last.
        fixed_order, grouped: see `RecordedStep`.
        ranks: see `step_file.Reported`.
    """

    trace: StepTrace
    fixed_order: bool
    grouped: bool
    ranks: Sequence[Sequence[int]]

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
