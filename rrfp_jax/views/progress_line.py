"""Shows what lasts, for whoever uses a Trainer by hand: a live line on a terminal or in a notebook's cell.

A run from a config has a display of its own (`runs/display.py`), with a bar for its steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from rich.console import Console
from rich.status import Status

from rrfp_jax import printing
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.printing import Lenient, is_terminal
from rrfp_jax.progress import LIVE, MARK, Progress
from rrfp_jax.views.lasting import Lasting

LINE_AFTER, LINE_EVERY = 1.0, 10.0
"""Seconds until plain lines tell of something, and between two of them."""

LIVE_AFTER, LIVE_EVERY = 0.5, 0.1
"""The same for a line that is written over."""


def shown_progress() -> Progress:
    """A listener that shows what lasts where this process prints."""
    if (cell := _display_of_cell()) is not None:
        return _in_cell(cell)
    return _on_terminal() if is_terminal() else printed_lines(printing.say)


def printed_lines(say: Callable[[str], None]) -> Lasting:
    """Lines by `say`: plain ones, or a live one if a launcher shows such."""
    if not ENVIRONMENT.get(LIVE):
        return plain_lines(say)

    def end(text: str, seconds: float) -> None:
        say(MARK)
        say(f"{text}: done after {seconds:.1f} s")

    return Lasting(lambda text: say(f"{MARK}{text}"), end, LIVE_AFTER, LIVE_EVERY)


def plain_lines(say: Callable[[str], None]) -> Lasting:
    """Plain lines, `say(line)` each: once it has lasted for a second, every ten seconds, and at its end."""
    return Lasting(
        say, lambda text, seconds: say(f"{text}: done after {seconds:.1f} s"), LINE_AFTER, LINE_EVERY
    )


def _on_terminal() -> Lasting:
    """A live line that is gone once nothing lasts."""
    status: Status | None = None

    def show(text: str) -> None:
        nonlocal status
        if status is None:
            status = Status(text, console=Console(file=cast(TextIO, Lenient(sys.stdout))))
            status.start()
        status.update(text)

    def end(text: str, seconds: float) -> None:
        nonlocal status
        if status is not None:
            status.stop()
        status = None
        printing.say(f"{text}: done after {seconds:.1f} s")

    return Lasting(show, end, LIVE_AFTER, LIVE_EVERY)


def _in_cell(display: Any) -> Lasting:
    """A line below the cell that is written over."""
    handle: Any = None

    def show(text: str) -> None:
        nonlocal handle
        content = {"text/plain": text}
        if handle is None:
            handle = display(content, raw=True, display_id=True)
        else:
            handle.update(content, raw=True)

    def end(text: str, seconds: float) -> None:
        nonlocal handle
        show(f"{text}: done after {seconds:.1f} s")
        handle = None

    return Lasting(show, end, LIVE_AFTER, LIVE_EVERY)


def _display_of_cell() -> Any:
    """IPython's `display` if this runs in a notebook's kernel; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display
