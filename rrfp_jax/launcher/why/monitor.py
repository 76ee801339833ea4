"""The launcher's look at its ranks while it goes on watching them.

It looks when it is asked to, by SIGUSR1; when a rank's wait has come to its limit; and when a rank that runs
has given no sign of life for half the time after which the others give it up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rrfp_jax.files import shown_path
from rrfp_jax.launcher.why.judge import HangReport, judge
from rrfp_jax.launcher.why.snapshot import Look, recorded, recorder_in
from rrfp_jax.launcher.why.words import render_report
from rrfp_jax.runtime.run.recorder import (
    ENDED,
    HEARD,
    PLEAS,
    STARTING,
    counters_of,
    is_stopped,
    last_beat,
    read,
)

POLL_SECONDS = 0.5
"""Between looks at whether ranks want to be looked at."""

LEAST_SILENCE_SECONDS = 5.0
"""Of a rank, before it is looked at unasked."""

KEPT = "why.txt"


class HangMonitor:
    """See above; `folder` gives that of the run, which may be renamed, and `say` is told what is found.

    Attributes:
        stall: what was found when a wait first came to its limit; None if none has.
    """

    def __init__(
        self, count: int, folder: Callable[[], Path], say: Callable[[str], None], silence: float
    ) -> None:
        self._count, self._folder, self._say = count, folder, say
        self._silence = max(silence / 2, LEAST_SILENCE_SECONDS)
        self._silent: set[int] = set()  # ranks
        self._beats: dict[int, tuple[float, float]] = {}  # by rank, the latest, and when it was first seen
        self.stall: HangReport | None = None
        self._look: Look | None = None
        self._wanted = False
        self._requests: dict[int, int] = {}  # those that this look is for, by rank
        self._polled = 0.0

    def ask(self) -> None:
        """Look at the ranks as soon as that can be."""
        self._wanted = True

    def go_on(self) -> None:
        """Do what there is to do; returns at once."""
        try:
            if self._look is None:
                self._poll()
                if self._wanted or self._requests:
                    self._wanted = False
                    self._look = Look(self._folder(), sorted(recorded(self._folder())))
            elif self._look.done():
                self._judge(self._look)
                self._end()
        except (OSError, ValueError) as error:
            self._say(f"the ranks cannot be looked at: {error}")
            self._end()

    def _judge(self, look: Look) -> None:
        """Say what is found, and keep it with the stacks of all ranks in the run's folder."""
        seen = look.snapshots()
        if not seen:
            self._say("no rank has joined the run yet: they still start")
            return
        absent = sorted({*range(self._count)} - {one.rank for one in seen})
        report = judge(seen, absent=absent, stalls=bool(self._requests))
        self.stall = self.stall or (report if self._requests else None)
        path = self._folder() / KEPT
        try:
            path.write_text(f"{render_report(report)}\n", encoding="utf-8", errors="backslashreplace")
            where = f"the stacks of all ranks: {shown_path(path)}"
        except OSError as error:  # a full disk
            where = f"{path} cannot be written: {error.strerror}"
        self._say(f"{render_report(report, blamed_only=True)}\n{where}")

    def _end(self) -> None:
        """Let those go on that had asked for the look."""
        self._look = None
        for rank, request in self._requests.items():
            with suppress(OSError, ValueError):
                counters_of(recorder_in(self._folder(), rank))[HEARD] = request
        self._requests.clear()

    def _poll(self) -> None:
        """Note which ranks want to be looked at, or are silent; a few times a second is enough."""
        now = time.monotonic()
        if now - self._polled < POLL_SECONDS:
            return
        self._polled, folder = now, self._folder()
        for rank in range(self._count):
            path = recorder_in(folder, rank)
            with suppress(OSError, ValueError):
                counters = counters_of(path)
                if counters[PLEAS] > counters[HEARD]:
                    self._requests[rank] = counters[PLEAS]
                self._note_silence(rank, path, now)

    def _note_silence(self, rank: int, path: Path, now: float) -> None:
        """Look at a rank that has become silent, once; a stopped one is the supervisor's business."""
        beat = last_beat(path)
        known, since = self._beats.setdefault(rank, (beat, now))
        if beat != known:
            self._beats[rank] = (beat, now)
            self._silent.discard(rank)
        elif now - since >= self._silence and rank not in self._silent:
            recording = read(path)
            if recording.lives and recording.phase not in (STARTING, ENDED):
                self._silent.add(rank)
                self._wanted = self._wanted or not is_stopped(recording.pid)
