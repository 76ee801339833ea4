"""What is seen of ranks at one moment: flight recorders, answers, and stacks dumped without them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rrfp_jax.core.events import WaitCause
from rrfp_jax.files import read_whole
from rrfp_jax.runtime.run.recorder import (
    ANSWERED,
    ASKED,
    RecordedDispatch,
    Recording,
    is_stopped,
    read,
    recorder_in,
    shared_page,
)
from rrfp_jax.runtime.run.stacks import LOADER, StackFrame, Thread, dumped_threads
from rrfp_jax.runtime.run.status_report import StatusReport, read_report
from rrfp_jax.runtime.run.waits import AnyAwaited, Awaited, ForData, ForTask

State: TypeAlias = Literal["answers", "silent", "stopped", "gone"]

ANSWER_SECONDS = 3.0
"""For a rank to answer; it looks twice a second. One that cannot has its stacks dumped then."""

DUMP_SECONDS = 0.5

LARGEST_DUMP = 2**22
"""Bytes of a file of dumped stacks that is read."""


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """What is seen of a rank."""

    rank: int
    state: State
    now: float  # when it was looked at, in the seconds of `time.time()`
    recording: Recording
    report: StatusReport | None = None  # its answer
    threads: Sequence[Thread] = ()  # by its answer or dumped without it; none if unknown

    @property
    def waiting(self) -> Sequence[AnyAwaited]:
        """What its main thread waits for."""
        return () if self.report is None else self.report.waiting

    @property
    def place(self) -> Awaited | None:
        """What it waits for, without times: equal on ranks that are at the same point."""
        return self.waiting[0].place if self.waiting else None

    @property
    def cause(self) -> WaitCause | None:
        """Why its stage dispatches nothing, if it waits for that."""
        return self.waiting[0].why.cause if self.waiting and isinstance(self.waiting[0], ForTask) else None

    @property
    def users(self) -> StackFrame | None:
        """The user's line that it is in: its main thread, or another one for which that waits."""
        threads = sorted(filter(self._may_wait_for, self.threads), key=lambda thread: not thread.is_main)
        return next((thread.users for thread in threads if thread.users is not None), None)

    def _may_wait_for(self, thread: Thread) -> bool:
        """Whether what a thread does may hold up the main one, or is that; of dumped ones nobody knows."""
        if thread.is_main or self.report is None:
            return True
        if thread.name == LOADER:  # it loads ahead
            return isinstance(self.place, ForData)
        return not thread.is_users_own

    @property
    def main_frames(self) -> Sequence[StackFrame]:
        """Where its main thread is, innermost first."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())

    @property
    def listens(self) -> bool:
        """Whether it waits for others, and so takes in what comes."""
        return self.state == "answers" and bool(self.waiting) and self.users is None

    @property
    def is_busy(self) -> bool:
        """Whether its main thread does something that is neither a wait nor the user's code."""
        return self.state == "answers" and not self.waiting and self.users is None

    @property
    def running(self) -> Sequence[RecordedDispatch]:
        """The tasks on its devices, the oldest first, as far as it still knows them."""
        if (round := self.recording.round) is None:
            return []
        return [entry for entry in self.recording.last if entry.position > round.ended]


class Look:
    """A look at some ranks of a run on this machine, which have flight recorders in its folder.

    `done` is called again and again until it says that all have answered, or do not. PermissionError says
    that they are another user's, OSError or ValueError that a flight recorder cannot be read.
    """

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder = folder
        self._counters = {rank: shared_page(recorder_in(folder, rank)).counters for rank in ranks}
        self._asked = {rank: max(own[ASKED], own[ANSWERED]) + 1 for rank, own in self._counters.items()}
        for rank, number in self._asked.items():
            self._counters[rank][ASKED] = number
        self._began, self._dumped = time.monotonic(), 0.0
        self._dumps: set[int] = set()

    def done(self) -> bool:
        unanswered = [self._read(rank) for rank in self._counters if not self._has_answered(rank)]
        silent = [one for one in unanswered if one.lives and not is_stopped(one.pid)]
        if not silent:
            return True
        waited = time.monotonic() - self._began
        if waited > ANSWER_SECONDS and not self._dumped:
            for one in silent:  # by the signal that it listens to, if it does
                with suppress(ProcessLookupError):
                    if one.dump_signal:
                        os.kill(one.pid, one.dump_signal)
                        self._dumps.add(one.rank)
            self._dumped = waited
        return bool(self._dumped) and waited > self._dumped + DUMP_SECONDS

    def snapshots(self) -> list[RankSnapshot]:
        return list(map(self._snapshot, self._counters))

    def _snapshot(self, rank: int) -> RankSnapshot:
        recording = self._read(rank)
        report = read_report(self._folder, rank) if self._has_answered(rank) else None
        if report is not None and report.number < self._asked[rank]:
            report = None
        state: State = "silent" if report is None else "answers"
        if not recording.lives:
            state = "gone"
        elif is_stopped(recording.pid):
            state = "stopped"
        threads = self._dumped_threads(rank) if report is None else report.threads
        return RankSnapshot(
            rank=rank, state=state, now=time.time(), recording=recording, report=report, threads=threads
        )

    def _read(self, rank: int) -> Recording:
        return read(recorder_in(self._folder, rank))

    def _has_answered(self, rank: int) -> bool:
        return bool(self._counters[rank][ANSWERED] >= self._asked[rank])

    def _dumped_threads(self, rank: int) -> Sequence[Thread]:
        with suppress(OSError):
            if rank in self._dumps:
                text = read_whole(self._folder / f"stacks-{rank}.txt", LARGEST_DUMP)
                return dumped_threads(text.decode("utf-8", "replace").splitlines())
        return ()
