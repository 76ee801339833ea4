"""What there is to be seen of a run just now, from the files in its folder; the run may be writing them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from rrfp_jax.json_files import Count, Unreadable, read_json
from rrfp_jax.name_lock import hold_on
from rrfp_jax.report.run_folder import shared_by
from rrfp_jax.report.store import LATEST, METRICS, StepLine, read_lines, read_steps
from rrfp_jax.runtime.run.recorder import ENDED, Recording, latest_recorded
from rrfp_jax.trace.idleness import StageTimes, stage_times
from rrfp_jax.trace.records import RecordedStep, link_seconds

LATEST_BYTES = 2**18
"""Of `metrics.jsonl` that are read, from its end: hundreds of steps of a few stages, ten of 512."""

REMEMBERED = 10
"""Steps that were looked at, by which it is judged who is slow: a single one may be an accident."""

ALIVE_SECONDS = 5.0
"""A flight recorder tells of a process that lives if it was beaten so shortly ago."""


class Edge(NamedTuple):
    """Messages from a stage to another: seconds from a task's end until its receiver is ready."""

    source: int
    target: int
    median: float
    worst: float


class LatestStep(RecordedStep):
    """A step, of the replica that ended last; what takes long to find, with many tasks, is found once."""

    @cached_property
    def times(self) -> Sequence[StageTimes]:
        """How each stage spent the step."""
        return stage_times(self.trace, self.fixed_order, self.grouped)

    @cached_property
    def edges(self) -> Sequence[Edge]:
        """Edges between stages, those first whose messages take longest in the median."""
        found = link_seconds([self.trace]).items()
        edges = [Edge(*between, median(own), max(own)) for between, own in found]
        return sorted(edges, key=lambda edge: (-edge.median, edge.source, edge.target))


def read_latest(path: Path) -> LatestStep:
    """The step in a file that `StepFile` wrote; `Unreadable` if it is something else."""
    steps = [step for group in read_steps(path).values() for step in group]
    if len(steps) != 1 or not steps[0].ranks:
        raise Unreadable(f"{path} has {len(steps)} steps, not one with its ranks")
    return LatestStep(**vars(steps[0]))


class State(StrEnum):
    """How far a run is."""

    ABSENT = "has not begun"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class _Config(msgspec.Struct, frozen=True):
    """Of `config.json`."""

    steps: Count | None = None
    origin: Any = msgspec.field(default=None, name="_origin")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A look at a run; times in the seconds of `time.time()`."""

    folder: Path
    state: State
    now: float
    steps: int | None = None  # that the run is to have; None if it has not said so yet
    lines: Sequence[StepLine] = ()  # of the latest steps, the last one last
    told_at: float = 0.0  # when the last of them was written
    latest: LatestStep | None = None
    busy: Sequence[Sequence[Sequence[float]]] = ()  # of that step and those looked at before, see `StepTrace`
    recorders: Sequence[Recording] = ()  # of its processes, by rank; none if it has no launcher
    failed: bool = False  # whether a diagnosis was written
    shared: str = ""  # see `Run.shared`

    @property
    def last(self) -> StepLine | None:
        """The latest line."""
        return self.lines[-1] if self.lines else None


class Looker:
    """Looks at a run again and again, whose folder need not be there; reads tasks only if they are others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_at = 0.0
        self._latest: LatestStep | None = None
        self._busy: deque[Sequence[Sequence[float]]] = deque(maxlen=REMEMBERED)

    def look(self) -> Seen:
        """What there is now. What is only half there is passed over: it will be whole the next time."""
        folder, now = self._folder, time.time()
        diagnosed = _changed(folder / "diagnosis.txt")
        recorders = [own for _, own in sorted(latest_recorded(folder)[1].items())]
        began = _changed(folder / "config.json") or diagnosed  # it may have died before it wrote the first
        state = _state(folder, began, recorders, now)
        if began is None or state in (State.ABSENT, State.STARTING):
            return Seen(folder=folder, state=state, now=now, recorders=recorders)
        config = _Config()
        with suppress(Unreadable):
            config = read_json(folder / "config.json", _Config)
        return Seen(
            folder=folder,
            state=state,
            now=now,
            steps=config.steps,
            shared=shared_by(config.origin),
            lines=[line for line, _ in read_lines(folder / METRICS, LATEST_BYTES)[0]],
            told_at=_changed(folder / METRICS) or began,
            latest=self._step(began),
            busy=list(self._busy),
            recorders=recorders,
            failed=diagnosed is not None and diagnosed >= began,
        )

    def _step(self, began: float) -> LatestStep | None:
        written = _changed(self._folder / LATEST)
        if written is None or written < began:  # of an earlier start
            self._read_at, self._latest = 0.0, None
            self._busy.clear()
            return None
        if written != self._read_at:
            with suppress(Unreadable):
                self._latest = read_latest(self._folder / LATEST)
                self._read_at = written
                self._busy.append(self._latest.trace.busy_seconds)
        return self._latest


def _state(folder: Path, began: float | None, recorders: Sequence[Recording], now: float) -> State:
    """By the lock on the run's name; by processes' signs of life where it says nothing."""
    alive = any(now - one.beat < ALIVE_SECONDS and one.phase != ENDED for one in recorders)
    hold = hold_on(folder)
    if hold is not None and (hold.certain or alive):
        return State.RUNNING if began is not None and began >= hold.since else State.STARTING
    if began is not None:
        return State.ENDED
    return State.STARTING if alive else State.ABSENT


def _changed(path: Path) -> float | None:
    """When a file was last written (s); None if there is none."""
    with suppress(OSError):
        return path.stat().st_mtime
    return None
