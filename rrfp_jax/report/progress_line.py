"""Shows what lasts, for whoever uses a Trainer by hand: a live line on a terminal or in a notebook's cell.

What is soon over is not shown, nor anything more often than somebody reads. A run from a config has a display
of its own (`runs/display.py`), with a bar for its steps.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from time import monotonic
from typing import Any, TextIO, cast

from rich.console import Console
from rich.status import Status

from rrfp_jax import printing
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.printing import Lenient, Say, is_terminal
from rrfp_jax.progress import LIVE, MARK, Doing, Progress


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
        end: is given the last text of what was shown, with how long that took.
        after: how long something must last to be shown (s).
        every: the least time between two texts about the same (s).
    """

    def __init__(self, show: Say, end: Say, after: float, every: float) -> None:
        self._show, self._end, self._after, self._every = show, end, after, every
        self._begun: dict[str, _Begun] = {}
        self._lock = threading.RLock()

    def __call__(self, doing: Doing) -> None:
        """Take in what is being done."""
        with self._lock:
            begun, now = self._begun.get(doing.what), monotonic()
            if begun is None:
                timer = threading.Timer(self._after, self._show_if_due, [doing.what])
                timer.daemon = True
                timer.start()
                begun = self._begun[doing.what] = _Begun(now, doing, timer)
            begun.latest = doing
            if doing.done >= doing.total:
                begun.timer.cancel()
                del self._begun[doing.what]
                if begun.shown_at is not None:
                    self._end(f"{text_of(doing)}: done after {now - begun.since:.1f} s")
            elif now - begun.since >= self._after:
                self._show_if_due(doing.what)

    def close(self) -> None:
        """Forget what is under way."""
        with self._lock:
            for begun in self._begun.values():
                begun.timer.cancel()
            self._begun.clear()

    def _show_if_due(self, what: str) -> None:
        """Also in the timer's thread."""
        with self._lock:
            begun, now = self._begun.get(what), monotonic()
            if begun is not None and (begun.shown_at is None or now - begun.shown_at >= self._every):
                begun.shown_at = now
                self._show(text_of(begun.latest))


def text_of(doing: Doing) -> str:
    """It in words: "compiling 5/7 kinds (64 layers), bucket 2 of 3"."""
    parts = f" {doing.parts}" if doing.parts else ""
    count = f" {doing.done}/{doing.total}{parts}" if doing.total > 1 else ""
    return f"{doing.what}{count}" + (f", {doing.detail}" if doing.detail else "")


LINE_AFTER, LINE_EVERY = 1.0, 10.0
"""Seconds until plain lines tell of something, and between two of them."""

LIVE_AFTER, LIVE_EVERY = 0.5, 0.1
"""The same for a line that is written over."""


def shown_progress() -> Progress:
    """A listener that shows what lasts where this process prints."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return _in_cell()
    return _on_terminal() if is_terminal() else printed_lines(printing.say)


def printed_lines(say: Say) -> Lasting:
    """Lines by `say`: plain ones, or a live one if a launcher shows such."""
    if not ENVIRONMENT.get(LIVE):
        return Lasting(say, say, LINE_AFTER, LINE_EVERY)

    def end(text: str) -> None:
        say(MARK)
        say(text)

    return Lasting(lambda text: say(f"{MARK}{text}"), end, LIVE_AFTER, LIVE_EVERY)


def _on_terminal() -> Lasting:
    """A live line that is gone once nothing lasts."""
    live: list[Status] = []  # one, or none

    def show(text: str) -> None:
        if not live:
            live.append(Status(text, console=Console(file=cast(TextIO, Lenient(sys.stdout)))))
            live[0].start()
        live[0].update(text)

    def end(text: str) -> None:
        while live:
            live.pop().stop()
        printing.say(text)

    return Lasting(show, end, LIVE_AFTER, LIVE_EVERY)


def _in_cell() -> Lasting:
    """A line below a notebook's cell that is written over."""
    from IPython.display import display

    live: list[Any] = []  # one, or none

    def show(text: str) -> None:
        content = {"text/plain": text}
        if live:
            live[0].update(content, raw=True)
        else:
            live.append(display(content, raw=True, display_id=True))  # type: ignore[no-untyped-call]

    def end(text: str) -> None:
        show(text)
        live.clear()

    return Lasting(show, end, LIVE_AFTER, LIVE_EVERY)
