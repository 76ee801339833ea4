"""The latest step of a run in a file, `latest-step`: from it other processes learn where the time went.

A line of JSON, then the records of its tasks as `Part` packs them. It is replaced whole, at most once a
second, so a reader finds one step or the next. The run copies bytes that it has; whoever reads finds causes.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple, Protocol

import msgspec

from rrfp_jax.core.tasks import Placement
from rrfp_jax.files import read_whole
from rrfp_jax.json_files import Count, Seconds, Unreadable, as_kind, parse_json
from rrfp_jax.trace.idleness import StageTime, stage_times
from rrfp_jax.trace.records import RECORD, Part, RecordedStep, StepTrace


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


NAME = "latest-step"

EVERY_SECONDS = 1.0

LARGEST = 2**28
"""Bytes that are read: some five million tasks."""


class Reported(Protocol):
    """What is written of a step's report; see `train.report.Report`."""

    @property
    def recorded(self) -> RecordedStep:
        """The tasks with their times."""

    @property
    def ranks(self) -> Sequence[Sequence[int]]:
        """Per replica and stage, one after the other, the ranks of its processes."""


class StepFile:
    """The writer's side, on rank 0.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._part = folder / NAME, folder / f".{NAME}.part"
        self._due = -inf
        self._left_out: Reported | None = None

    def add(self, report: Reported) -> None:
        """Write a step, unless one was written less than a second ago.

        Raises:
            OSError: the file cannot be written.
        """
        self._left_out = report
        if (now := monotonic()) >= self._due:
            self._due = now + EVERY_SECONDS
            self.flush()

    def flush(self) -> None:
        """Write the latest step if it was left out; raises as `add` does."""
        if self._left_out is not None:
            self._part.write_bytes(_packed(self._left_out))
            os.replace(self._part, self._path)
            self._left_out = None


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's first line; `form` is that of a record, `records` their number."""

    form: str
    records: Count
    step: Count
    placement: Placement
    fixed_order: bool
    grouped: bool
    replica: Count
    busy_by_replica: list[list[Seconds]]
    ranks: list[list[Count]]


def read_step(path: Path) -> LatestStep:
    """The step in a file that `StepFile` wrote.

    Raises:
        Unreadable: there is no such file, or it is something else.
    """
    try:
        line, _, packed = read_whole(path, LARGEST).partition(b"\n")
        return _checked(as_kind(parse_json(line), _Head), packed)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Unreadable(f"{path} is not a step of this version of rrfp_jax: {error}") from None


def _packed(report: Reported) -> bytes:
    trace = report.recorded.trace
    packed = b"".join(part.packed for part in trace.parts)
    head: Mapping[str, Any] = {
        "form": RECORD.format,
        "records": len(packed) // RECORD.size,
        "step": trace.step,
        "placement": asdict(trace.placement),
        "fixed_order": report.recorded.fixed_order,
        "grouped": report.recorded.grouped,
        "replica": trace.replica,
        "busy_by_replica": trace.busy_by_replica,
        "ranks": report.ranks,
    }
    return b"%s\n%s" % (json.dumps(head).encode(), packed)


def _checked(head: _Head, packed: bytes) -> LatestStep:
    """What head and records say; ValueError if they do not belong together."""
    stages, chunks = head.placement.stages, head.placement.chunks
    if head.form != RECORD.format or len(packed) != head.records * RECORD.size or not packed:
        raise ValueError(f"{len(packed)} bytes are not {head.records} records of the form {head.form!r}")
    replicas = len(head.busy_by_replica) or 1
    if any(len(row) != stages for row in head.busy_by_replica) or head.replica >= replicas:
        raise ValueError(f"replica {head.replica} of {replicas}, or times of other than {stages} stages")
    if len(head.ranks) != stages * replicas or not all(head.ranks):
        raise ValueError(f"ranks of {len(head.ranks)} stages for {replicas} replicas")
    records = Part(0.0, 0.0, {}, packed).records()
    for record in records:
        _, task, _, *times, _ = record
        if not (0 <= record.stage < stages and 0 <= task.chunk < chunks and all(map(isfinite, times))):
            raise ValueError(f"a record of stage {record.stage}, task {task}, times {times}")
    return LatestStep(
        trace=StepTrace(head.step, head.placement, [Part.of(records)], head.replica, head.busy_by_replica),
        fixed_order=head.fixed_order,
        grouped=head.grouped,
        ranks=head.ranks,
    )
