"""Looks at the ranks of a living run: asks each what it is at, and waits a little for the answers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.files import read_whole
from rrfp_jax.launcher.why.sight import Sight, State
from rrfp_jax.runtime.lifecycle.testimony import read_testimony
from rrfp_jax.runtime.processes.counters import ANSWERED, ASKED, Counters
from rrfp_jax.runtime.processes.flight_recorder import counters_of, read
from rrfp_jax.runtime.processes.proc import is_stopped
from rrfp_jax.runtime.processes.recording import Recording
from rrfp_jax.runtime.processes.stacks import Thread, dumped_threads

ANSWER_SECONDS = 3.0
"""For a rank to answer; it looks twice a second. One that cannot has its stacks dumped then."""

DUMP_SECONDS = 0.5

LARGEST_DUMP = 2**22
"""Bytes of a file of dumped stacks that is read."""


class Look:
    """A look at some ranks, whose runs all are on this machine; use as a context manager.

    `done` is called again and again until it says that all have answered, or do not.

    Args:
        folder: of the run.
        ranks: that have flight recorders there.

    Raises:
        PermissionError: they are another user's.
        OSError, ValueError: a flight recorder cannot be read.
    """

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._asked: dict[int, int] = {}
        self._counters: dict[int, Counters] = {}
        self._began, self._dumped = time.monotonic(), 0.0
        self._dumps: set[int] = set()
        with ExitStack() as stack:
            for rank in ranks:
                counters = stack.enter_context(counters_of(folder / f"flight-{rank}"))
                self._counters[rank] = counters
                counters[ASKED] = self._asked[rank] = max(counters[ASKED], counters[ANSWERED]) + 1
            self._stack = stack.pop_all()

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *why: object) -> None:
        self._stack.close()

    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        silent = [rank for rank in self._counters if not self._has_answered(rank) and self._can_answer(rank)]
        if not silent:
            return True
        waited = time.monotonic() - self._began
        if waited > ANSWER_SECONDS and not self._dumped:
            for rank in silent:
                self._have_dumped(rank)
            self._dumped = waited
        return bool(self._dumped) and waited > self._dumped + DUMP_SECONDS

    def sights(self) -> list[Sight]:
        """What is seen of every rank."""
        return [self._sight(rank) for rank in self._counters]

    def _sight(self, rank: int) -> Sight:
        recording = read(self._folder / f"flight-{rank}")
        testimony = read_testimony(self._folder, rank) if self._has_answered(rank) else None
        if testimony is not None and testimony.number < self._asked[rank]:
            testimony = None
        state: State = "silent" if testimony is None else "answers"
        if not recording.lives:
            state = "gone"
        elif is_stopped(recording.pid):
            state = "stopped"
        threads = testimony.threads if testimony is not None else self._dumped_threads(rank)
        return Sight(
            rank=rank,
            state=state,
            now=time.time(),
            recording=recording,
            testimony=testimony,
            threads=threads,
        )

    def _has_answered(self, rank: int) -> bool:
        return self._counters[rank][ANSWERED] >= self._asked[rank]

    def _can_answer(self, rank: int) -> bool:
        recording = read(self._folder / f"flight-{rank}")
        return recording.lives and not is_stopped(recording.pid)

    def _have_dumped(self, rank: int) -> None:
        """Have a rank's stacks dumped by the signal that it listens to, if it does."""
        recording = read(self._folder / f"flight-{rank}")
        if recording.dump_signal and recording.lives:
            with suppress(ProcessLookupError):
                os.kill(recording.pid, recording.dump_signal)
                self._dumps.add(rank)

    def _dumped_threads(self, rank: int) -> tuple[Thread, ...]:
        if rank not in self._dumps:
            return ()
        try:
            text = read_whole(self._folder / f"stacks-{rank}.txt", LARGEST_DUMP)
        except OSError:
            return ()
        return tuple(dumped_threads(text.decode("utf-8", "replace").splitlines()))


def recorded(folder: Path) -> dict[int, Recording]:
    """The flight recorders in a folder by rank, without those that are being made just now."""
    found = {}
    for path in folder.glob("flight-*"):
        with suppress(OSError, ValueError):
            recording = read(path)
            found[recording.rank] = recording
    return found


def living_ranks(folder: Path) -> Sequence[int] | None:
    """The ranks of a run if any of them lives, else none; None if there are no flight recorders yet.

    Raises:
        UsageError: they are on another machine.
    """
    found = recorded(folder)
    hosts = sorted({recording.host for recording in found.values() if not recording.is_here})
    if hosts:
        raise UsageError(f"{folder}: the run is on {', '.join(hosts)}; run this command there")
    if not found:
        return None
    return sorted(found) if any(recording.lives for recording in found.values()) else []


def absent_ranks(folder: Path) -> Sequence[int]:
    """Those that the launcher has started and that have no flight recorder yet."""
    started = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.log"))
    return sorted(int(n) for n in started if n.isdecimal() and not (folder / f"flight-{n}").exists())
