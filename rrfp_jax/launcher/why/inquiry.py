"""The launcher's look at its ranks while it goes on watching them: for SIGUSR1, or a rank that stalls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rrfp_jax.launcher.why.looking import Look
from rrfp_jax.launcher.why.sight import Sight
from rrfp_jax.launcher.why.telling import told
from rrfp_jax.launcher.why.verdict import Verdict, judge
from rrfp_jax.runtime.processes.counters import HEARD, PLEAS
from rrfp_jax.runtime.processes.flight_recorder import counters_of

PLEA_POLL_SECONDS = 0.5

KEPT = "why.txt"


class Inquiry:
    """Looks at the ranks of a run when it is asked to, or when a wait of theirs has come to its limit.

    Args:
        count: of ranks.
        folder: gives that of the run, which may be renamed.
        say: is told what is found.

    Attributes:
        stall: what was found when a wait first came to its limit; None if none has.
    """

    def __init__(self, count: int, folder: Callable[[], Path], say: Callable[[str], None]) -> None:
        self._count, self._folder, self._say = count, folder, say
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
        ranks = [rank for rank in range(self._count) if (folder / f"flight-{rank}").exists()]
        try:
            self._look = Look(folder, ranks)
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
                verdict = judge(seen, stalls=bool(self._pleas))
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
        unseen, path = self._count - len(seen), self._folder() / KEPT
        more = f"\n{unseen} of the ranks have not begun to join yet" if unseen else ""
        try:
            path.write_text(f"{told(verdict, seen)}{more}\n", encoding="utf-8", errors="backslashreplace")
            more += f"\nthe stacks of all ranks: {os.path.relpath(path)}"
        except OSError as error:  # a full disk
            more += f"\n{path} cannot be written: {error.strerror}"
        self._say(told(verdict, seen, blamed_only=True) + more)

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

    def _set_heard(self, rank: int, plea: int) -> None:
        with suppress(OSError, ValueError), counters_of(self._folder() / f"flight-{rank}") as counters:
            counters[HEARD] = plea
