"""What the main thread waits for, for whom, and for how long at most: every wait of a run is one of these.

    with world.waits_for("the clocks from rank 2", limit) as wait:
        while not there():
            wait.check()
            sleep(wait.shortened(1.0))

Whoever has to say why a process ended (last words, a watchdog) asks `Waits.described`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeAlias

from rrfp_jax.errors import TrainingError

SHORTEST_PAUSE, PAUSE_SHARE = 2e-5, 0.05
"""Pause between looks at data that is on its way: this time (s), or this share of the time it has taken so
far, so that a long wait costs no more looks than a short one."""

STALL_SECONDS = 300.0

LONGEST_SLEEP_SECONDS = 1.0
"""Whoever sleeps looks around at least so often."""

STOOD_STILL_SECONDS = 10.0
"""If nobody has looked for so much longer than a pause, the process stood still, as by Ctrl-Z."""

LONGEST_SECONDS = 366 * 86400.0
"""Of a limit that a system call gets: a year."""

What: TypeAlias = str | Callable[[], Sequence[str]]
"""What is waited for; or what gives that as it is just now, with whom and since when, an item a line."""


def pause(waited_seconds: float) -> float:
    """How long to sleep (s) before the next look at what has been on its way for so long."""
    return max(SHORTEST_PAUSE, PAUSE_SHARE * waited_seconds)


def _nothing() -> None:
    """No launcher looks at this process."""


class Wait:
    """One wait under way.

    Args:
        who: waits, as messages name it.
        what: is waited for.
        limit_seconds: without progress.
        whom: gives the ranks that it waits for; None if it does not know them.
        at_limit: called before a wait is given up.

    Attributes:
        since: the beginning, or the last progress (s, `perf_counter`).
    """

    def __init__(
        self,
        who: str,
        what: What,
        limit_seconds: float,
        whom: Callable[[], Sequence[int]] | None = None,
        at_limit: Callable[[], None] = _nothing,
    ) -> None:
        self._who, self._what, self._limit = who, what, limit_seconds
        self._whom, self._at_limit = whom, at_limit
        self.since = self._looked = perf_counter()

    def progressed(self) -> None:
        """Something has come: the limit counts from now on."""
        self.since = self._looked = perf_counter()

    @property
    def waited(self) -> float:
        """Seconds without progress."""
        return perf_counter() - self.since

    @property
    def left(self) -> float:
        """Seconds up to the limit; 0 or less once it is reached."""
        return self._limit - self.waited

    def shortened(self, seconds: float) -> float:
        """A sleep that does not outlast the limit."""
        return max(min(seconds, self.left), 0.0)

    def check(self) -> None:
        """Give up at the limit.

        Raises:
            TrainingError: naming what was waited for.
        """
        if self.reached():
            raise TrainingError(f"{self._who} gives up waiting for {self.described()[0]}")

    def reached(self) -> bool:
        """Whether it has come to its limit; then others have looked at why (`lifecycle/attendance.py`)."""
        before, self._looked = self._looked, perf_counter()
        still = self._looked - before
        if still > STOOD_STILL_SECONDS + 2 * pause(before - self.since):
            self.since += still
        if self.left > 0:
            return False
        self._at_limit()
        return True

    def whom(self) -> Sequence[int]:
        """The ranks that it waits for; none if it does not know them."""
        return () if self._whom is None else self._whom()

    def described(self) -> Sequence[str]:
        """What is waited for, with whom and since when, an item a line."""
        if isinstance(self._what, str):
            return [f"{self._what}, since {self.waited:.1f} s"]
        return self._what()


class Waits:
    """The waits of the main thread: at most one at a time, or one within another.

    Args:
        who: gives the name of this process for messages.

    Attributes:
        stall_seconds: the limit of a wait that is given none.
        at_limit: called before a wait is given up.
        current: the innermost wait; None if the main thread waits for nothing.
    """

    def __init__(self, who: Callable[[], str]) -> None:
        self.stall_seconds = STALL_SECONDS
        self._who = who
        self.at_limit: Callable[[], None] = _nothing
        self.current: Wait | None = None
        self._broken_off: Sequence[str] = ()

    @contextmanager
    def waits_for(
        self,
        what: What,
        limit_seconds: float | None = None,
        whom: Callable[[], Sequence[int]] | None = None,
    ) -> Iterator[Wait]:
        """Inside, the main thread waits for this."""
        limit = self.stall_seconds if limit_seconds is None else limit_seconds
        outer, self.current = self.current, Wait(self._who(), what, limit, whom, self.at_limit)
        if outer is None:
            self._broken_off = ()
        try:
            yield self.current
        except BaseException:
            # As text: whoever catches the error must not keep alive what the wait was for.
            self._broken_off = self._broken_off or tuple(self.current.described())
            raise
        finally:
            self.current = outer

    def described(self) -> Sequence[str]:
        """What the main thread waits for, or waited for when an error came; from any thread.

        The main thread may be changing that just now, which may raise RuntimeError or LookupError.
        """
        current = self.current
        return self._broken_off if current is None else current.described()

    def told(self) -> tuple[str, ...]:
        """The same, or nothing if the main thread was changing it; from any thread."""
        try:
            return tuple(self.described())
        except (RuntimeError, LookupError):
            return ()
