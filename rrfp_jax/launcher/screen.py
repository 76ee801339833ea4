"""Where a launcher prints what its ranks print: lines, and below them a live line that is written over.

A rank's line that begins with `MARK` is its live line, and ends the one before; an empty one takes it away.
Ranks write them only if they are told to by the environment (`LIVE`), which is where stdout is a terminal.
"""

from __future__ import annotations

import os
import sys

from rrfp_jax.printing import CANNOT_PRINT, is_terminal, write_bytes
from rrfp_jax.progress import LIVE, MARK

CLEAR = b"\r\x1b[K"


class Screen:
    """The launcher's stdout. When it is gone the run goes on; its logs have it all."""

    def __init__(self) -> None:
        self._live = b""

    @property
    def environment(self) -> dict[str, str]:
        """What ranks are told, so that they write live lines where these can be seen."""
        return {LIVE: "1"} if is_terminal() else {}

    def show(self, rank: int, line: bytes) -> None:
        """A line that a rank has printed, ended or not."""
        text = line.removesuffix(b"\n")
        if text.startswith(MARK.encode()):
            self.live(text.removeprefix(MARK.encode()))
        else:
            write_bytes(self._cleared() + b"[%d] " % rank + text + b"\n" + self._live)

    def live(self, text: bytes = b"") -> None:
        """Another live line, cut to the width of the terminal; without a text there is none any more."""
        if text or self._live:
            before, self._live = self._cleared(), text[: _columns() - 1]
            write_bytes(before + self._live)

    def _cleared(self) -> bytes:
        return CLEAR if self._live else b""


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80  # 0 if nobody has told it
    except CANNOT_PRINT:  # no terminal, or no file at all
        return 80
