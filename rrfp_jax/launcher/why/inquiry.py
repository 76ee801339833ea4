"""The launcher's look at its ranks while it goes on watching them.

It looks when it is asked to, by SIGUSR1; when a rank's wait has come to its limit; and when a rank that runs
has given no sign of life for half the time after which the others give it up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rrfp_jax.files import shown_path
from rrfp_jax.launcher.why.looking import Look, recorded
from rrfp_jax.launcher.why.sight import Sight
from rrfp_jax.launcher.why.telling import told
from rrfp_jax.launcher.why.verdict import Verdict, judge
from rrfp_jax.runtime.processes.counters import HEARD, PLEAS
from rrfp_jax.runtime.processes.flight_recorder import counters_of, last_beat, read
from rrfp_jax.runtime.processes.proc import is_stopped

PLEA_POLL_SECONDS = 0.5

LEAST_SILENCE_SECONDS = 5.0
"""Of a rank, before it is looked at unasked."""

KEPT = "why.txt"


class Inquiry:
    """See above.

    Args:
        count: of ranks.
        folder: gives that of the run, which may be renamed.
        say: is told what is found.
        silence: the limit on a rank's silence, in seconds.

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
        self.stall: Verdict | None = None
        self._look: Look | None = None
        self._wanted = False
        self._pleas: dict[int, int] = {}  # those that this look is for, by rank
        self._polled = 0.0

    def ask(self) -> None:
        """Look at the ranks as soon as that can be."""
        self._wanted = True

    def go_on(self) -> None:
        """Do what there is to do; returns at once."""
        if self._look is None:
            self._hear_pleas()
            if self._wanted or self._pleas:
                self._begin()
        elif self._look.done():
            self._end(self._look)

    def close(self) -> None:
        """Look no more."""
        if self._look is not None:
            self._look.__exit__()
            self._look = None

    def _begin(self) -> None:
        self._wanted = False
        folder = self._folder()
        try:
            self._look = Look(folder, sorted(recorded(folder)))
        except (OSError, ValueError) as error:
            self._pleas.clear()
            self._say(f"the ranks cannot be looked at: {error}")

    def _end(self, look: Look) -> None:
        """Say what is found, and let those go on that had asked for it."""
        try:
            seen = look.sights()
        except (OSError, ValueError) as error:
            self._say(f"the ranks cannot be looked at: {error}")
        else:
            if seen:
                absent = sorted({*range(self._count)} - {sight.rank for sight in seen})
                verdict = judge(seen, absent=absent, stalls=bool(self._pleas))
                self.stall = self.stall or (verdict if self._pleas else None)
                self._tell(verdict, seen)
            else:
                self._say("no rank has joined the run yet: they still start")
        self.close()
        for rank, plea in self._pleas.items():
            self._set_heard(rank, plea)
        self._pleas.clear()

    def _tell(self, verdict: Verdict, seen: Sequence[Sight]) -> None:
        """Say it, and keep it with the stacks of all ranks in the run's folder."""
        path = self._folder() / KEPT
        try:
            path.write_text(f"{told(verdict, seen)}\n", encoding="utf-8", errors="backslashreplace")
            where = f"the stacks of all ranks: {shown_path(path)}"
        except OSError as error:  # a full disk
            where = f"{path} cannot be written: {error.strerror}"
        self._say(f"{told(verdict, seen, blamed_only=True)}\n{where}")

    def _hear_pleas(self) -> None:
        """Note which ranks want to be looked at; a few times a second is enough."""
        now = time.monotonic()
        if now - self._polled < PLEA_POLL_SECONDS:
            return
        self._polled, folder = now, self._folder()
        for rank in range(self._count):
            with suppress(OSError, ValueError), counters_of(folder / f"flight-{rank}") as counters:
                if counters[PLEAS] > counters[HEARD]:
                    self._pleas[rank] = counters[PLEAS]
                self._note_silence(rank, folder / f"flight-{rank}", now)

    def _note_silence(self, rank: int, path: Path, now: float) -> None:
        """Look at a rank that has become silent, once; a stopped one is the supervisor's business."""
        beat = last_beat(path)
        known, since = self._beats.setdefault(rank, (beat, now))
        if beat != known:
            self._beats[rank] = (beat, now)
            self._silent.discard(rank)
        elif now - since >= self._silence and rank not in self._silent:
            recording = read(path)
            if recording.lives and recording.phase not in ("starting", "ended"):
                self._silent.add(rank)
                self._wanted = self._wanted or not is_stopped(recording.pid)

    def _set_heard(self, rank: int, plea: int) -> None:
        with suppress(OSError, ValueError), counters_of(self._folder() / f"flight-{rank}") as counters:
            counters[HEARD] = plea
