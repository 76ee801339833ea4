"""The waits of a process that joins its run: what for, how long still, and an end at the limit.

JAX waits inside C++, where no exception of ours reaches it, and some of its calls have no limit. So a thread
of our own says from time to time what is waited for, and ends the process if the limit has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import NamedTuple

from rrfp_jax.errors import TrainingError
from rrfp_jax.printing import warn

REMINDER_SECONDS = 30.0

GRACE_SECONDS = 5.0
"""Whatever has a limit of its own, and can say more, comes first."""

POLL_SECONDS = 0.5


class _Awaited(NamedTuple):
    what: str
    seconds: float
    since: float
    tried: Callable[[], str]

    @property
    def left(self) -> float:
        return self.since + self.seconds - monotonic()


class Joining:
    """Use as a context manager: its thread lives inside, from the first wait on.

    Args:
        rank: of this process.
        give_up: called in the thread once a limit has passed; must not return.
    """

    def __init__(self, rank: int, give_up: Callable[[TrainingError], None]) -> None:
        self._rank, self._give_up = rank, give_up
        self._awaited: _Awaited | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrfp-joining", daemon=True)

    def waits_for(self, what: str, seconds: float, tried: Callable[[], str] = str) -> None:
        """From now on this is waited for, at most so long; `tried` says how far that has come, in words."""
        self._awaited = _Awaited(what, seconds, monotonic(), tried)
        if self._thread.ident is None:
            self._thread.start()

    def __enter__(self) -> Joining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()

    def _watch(self) -> None:
        reminded = monotonic()
        while not self._done.wait(POLL_SECONDS):
            awaited = self._awaited
            assert awaited is not None
            if awaited.left + GRACE_SECONDS < 0:
                sentence = f"{awaited.what} did not come within {awaited.seconds:g} s"
                self._give_up(TrainingError(_with_reason(sentence, awaited.tried())))
            elif monotonic() - reminded >= REMINDER_SECONDS:
                reminded = monotonic()
                said = f"rank {self._rank} waits for {awaited.what}, {max(awaited.left, 0.0):.0f} s left"
                warn(_with_reason(said, awaited.tried()))


def _with_reason(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence
