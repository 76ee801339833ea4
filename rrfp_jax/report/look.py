"""What there is to be seen of a run just now, from the files in its folder; the run may be writing them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from rrfp_jax.files import staged
from rrfp_jax.json_files import Count, Unreadable, read_json
from rrfp_jax.report.figures import LatestStep, read_latest
from rrfp_jax.report.store import LATEST, METRICS, StepLine, read_lines
from rrfp_jax.runtime.run import recorder as flight_recorder
from rrfp_jax.runtime.run.name_lock import hold_on
from rrfp_jax.runtime.run.recorder import Recording

LATEST_BYTES = 2**18
"""Of `metrics.jsonl` that are read, from its end: hundreds of steps of a few stages, ten of 512."""

REMEMBERED = 10
"""Steps that were looked at, by which it is judged who is slow: a single one may be an accident."""

ALIVE_SECONDS = 5.0
"""A flight recorder tells of a process that lives if it was beaten so shortly ago."""


class State(StrEnum):
    """How far a run is."""

    ABSENT = "has not begun"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class _Config(msgspec.Struct, frozen=True):
    """Of `config.json`."""

    steps: Count


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A look at a run.

    Attributes:
        folder: of the run.
        state: of it.
        now: when it was looked at, in the seconds of `time.time()`.
        steps: that the run is to have; None if it has not said so yet.
        lines: of the latest steps, the last one last.
        told_at: when the last of them was written, in the same seconds.
        latest: the tasks of one of the latest steps, if there is one.
        busy: how long stages of that and of the steps looked at before were busy, see `StepTrace`.
        recorders: of its processes, by rank; none if it has no launcher.
        failed: whether a diagnosis was written.
    """

    folder: Path
    state: State
    now: float
    steps: int | None = None
    lines: Sequence[StepLine] = ()
    told_at: float = 0.0
    latest: LatestStep | None = None
    busy: Sequence[Sequence[Sequence[float]]] = ()
    recorders: Sequence[Recording] = ()
    failed: bool = False

    @property
    def last(self) -> StepLine | None:
        """The latest line."""
        return self.lines[-1] if self.lines else None


class Looker:
    """Looks at a run again and again; reads a step's tasks only when there are others.

    Args:
        folder: of the run, which need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_at = 0.0
        self._latest: LatestStep | None = None
        self._busy: deque[Sequence[Sequence[float]]] = deque(maxlen=REMEMBERED)

    def look(self) -> Seen:
        """What there is now. What is only half there is passed over: it will be whole the next time."""
        folder, now = self._folder, time.time()
        began, recorders = _changed(folder / "config.json"), recorders_of(folder)
        state = _state(folder, began, recorders, now)
        if began is None or state in (State.ABSENT, State.STARTING):
            return Seen(folder=folder, state=state, now=now, recorders=recorders)
        return Seen(
            folder=folder,
            state=state,
            now=now,
            steps=_steps(folder / "config.json"),
            lines=[line for line, _ in read_lines(folder / METRICS, LATEST_BYTES)[0]],
            told_at=_changed(folder / METRICS) or began,
            latest=self._step(began),
            busy=list(self._busy),
            recorders=recorders,
            failed=(_changed(folder / "diagnosis.txt") or 0.0) >= began,
        )

    def _step(self, began: float) -> LatestStep | None:
        written = _changed(self._folder / LATEST)
        if written is None or written < began:  # of an earlier start
            self._read_at, self._latest = 0.0, None
            self._busy.clear()
            return None
        if written != self._read_at:
            try:
                self._latest = read_latest(self._folder / LATEST)
            except Unreadable:
                return self._latest
            self._read_at = written
            self._busy.append(self._latest.trace.busy_seconds)
        return self._latest


def recorders_of(folder: Path) -> list[Recording]:
    """The flight recorders of a run's processes, by rank: in its folder, or where a launcher prepares it.

    Where the latest sign of life is: a launcher that was killed leaves what it had prepared.
    """
    found = [_recorders_in(place) for place in (folder, *staged(folder))]
    latest = max(found, key=lambda own: max((one.beat for one in own), default=0.0))
    return sorted(latest, key=lambda one: one.rank)


def _recorders_in(place: Path) -> list[Recording]:
    found = []
    for path in place.glob("flight-*"):
        with suppress(OSError, ValueError):  # being made, or of another version
            found.append(flight_recorder.read(path))
    return found


def _state(folder: Path, began: float | None, recorders: Sequence[Recording], now: float) -> State:
    """By the lock on the run's name; by processes' signs of life where it says nothing."""
    alive = any(now - one.beat < ALIVE_SECONDS and one.phase != flight_recorder.ENDED for one in recorders)
    hold = hold_on(folder)
    if hold is not None and (hold.certain or alive):
        return State.RUNNING if began is not None and began >= hold.since else State.STARTING
    if began is not None:
        return State.ENDED
    return State.STARTING if alive else State.ABSENT


def _steps(path: Path) -> int | None:
    try:
        return read_json(path, _Config).steps
    except Unreadable:
        return None


def _changed(path: Path) -> float | None:
    """When a file was last written (s); None if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
