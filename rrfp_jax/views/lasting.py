"""What lasts, as texts worth showing: of nothing that is soon over, and not more often than anyone reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from rrfp_jax.progress import Doing


@dataclass
class _Begun:
    """Something under way: since when, what was told last, and when that was last shown (s)."""

    since: float
    latest: Doing
    timer: threading.Timer
    shown_at: float | None = None


class Lasting:
    """A listener (`Progress`) that shows what has lasted for some time; from any thread.

    A timer shows what is told of nobody meanwhile, such as a file that takes long. It fires once. So whatever
    never ends, because an error came, is shown once too often at most.

    Args:
        show: is given a text, such as "compiling 17/56, bucket 2 of 3".
        end: is given the last text of what was shown, and how long that took (s).
        after: how long something must last to be shown (s).
        every: the least time between two texts about the same (s).
    """

    def __init__(
        self, show: Callable[[str], None], end: Callable[[str, float], None], after: float, every: float
    ) -> None:
        self._show, self._end, self._after, self._every = show, end, after, every
        self._begun: dict[str, _Begun] = {}
        self._lock = threading.RLock()

    def __call__(self, doing: Doing) -> None:
        """Take in what is being done."""
        with self._lock:
            begun = self._begun.get(doing.what)
            if begun is None:
                begun = self._begun[doing.what] = self._begin(doing)
            begun.latest = doing
            if doing.done >= doing.total:
                self._finish(begun)
            elif monotonic() - begun.since >= self._after:
                self._show_if_due(begun)

    def close(self) -> None:
        """Forget what is under way."""
        with self._lock:
            for begun in self._begun.values():
                begun.timer.cancel()
            self._begun.clear()

    def _begin(self, doing: Doing) -> _Begun:
        timer = threading.Timer(self._after, self._look, [doing.what])
        timer.daemon = True
        timer.start()
        return _Begun(monotonic(), doing, timer)

    def _look(self, what: str) -> None:
        """In the timer's thread."""
        with self._lock:
            if (begun := self._begun.get(what)) is not None:
                self._show_if_due(begun)

    def _show_if_due(self, begun: _Begun) -> None:
        now = monotonic()
        if begun.shown_at is None or now - begun.shown_at >= self._every:
            begun.shown_at = now
            self._show(text_of(begun.latest))

    def _finish(self, begun: _Begun) -> None:
        begun.timer.cancel()
        del self._begun[begun.latest.what]
        if begun.shown_at is not None:
            self._end(text_of(begun.latest), monotonic() - begun.since)


def text_of(doing: Doing) -> str:
    """It in words: "compiling 17/56, bucket 2 of 3"."""
    count = f" {doing.done}/{doing.total}" if doing.total > 1 else ""
    return f"{doing.what}{count}" + (f", {doing.detail}" if doing.detail else "")
