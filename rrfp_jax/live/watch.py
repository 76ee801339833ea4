"""Frames on a terminal, one after the other, until the run has ended or somebody has seen enough."""

from __future__ import annotations

import signal
from pathlib import Path
from time import monotonic, sleep

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rrfp_jax.live.bars import ASCII, BLOCKS
from rrfp_jax.live.frame import Screen, frame
from rrfp_jax.live.look import Looker, Seen, State

SETTLED_SECONDS = 10.0
"""A run that has ended for so long is not started again by its launcher."""


def shown(seen: Seen, console: Console, endless: bool) -> Text:
    """A frame for a console; an endless one may be longer than that."""
    glyphs = ASCII if console.options.ascii_only else BLOCKS
    height = None if endless else console.height
    return Text("\n", no_wrap=True).join(frame(seen, Screen(console.width, height, glyphs)))


def watch(folder: Path, every: float, console: Console) -> None:
    """Show a run until it has ended, and leave the last frame on the terminal; Ctrl-C or SIGTERM end it, too.

    Args:
        folder: of the run, which need not have begun.
        every: seconds between two looks.
        console: of a terminal.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is left in order
    looker = Looker(folder)
    seen = looker.look()
    ended_at = None if seen.state is not State.ENDED else monotonic() - SETTLED_SECONDS
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while ended_at is None or monotonic() - ended_at < SETTLED_SECONDS:
                live.update(shown(seen, console, endless=False), refresh=True)
                sleep(every)
                seen = looker.look()
                if seen.state is not State.ENDED:
                    ended_at = None
                elif ended_at is None:
                    ended_at = monotonic()
    except KeyboardInterrupt:
        pass
    console.print(shown(seen, console, endless=False))
