"""What is being done just now, told to whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

LIVE, MARK = "RRFP_LIVE", "\x1e"
"""A launcher on a terminal sets this variable for its ranks. Then a line that begins with the mark, ASCII's
record separator, is a live line: the next one is written over it (`launcher/supervisor.py`)."""


@dataclass(frozen=True)
class Doing:
    """Something that lasts, and how far it has got.

    Attributes:
        what: it is, as a participle: "compiling", "validating", "saving".
        done: how many of its parts are done. It is told with 0 when it begins, and with `total` when it ends.
        total: how many parts there are; it may grow on the way. 1 for what has no parts.
        detail: more about it, such as "bucket 2 of 3".
        parts: what is counted, such as "kinds (64 layers)".
    """

    what: str
    done: int
    total: int
    detail: str = ""
    parts: str = ""


Progress: TypeAlias = Callable[[Doing], None]
"""A listener. It may be called from several threads, though never by two at once for the same `what`. It
returns at once, and does not raise."""


def silent(doing: Doing) -> None:
    """A listener that shows nothing."""


@contextmanager
def during(progress: Progress, what: str, detail: str = "") -> Iterator[None]:
    """Inside, this is being done, as one part; it also ends with an error."""
    progress(Doing(what, 0, 1, detail))
    try:
        yield
    finally:
        progress(Doing(what, 1, 1, detail))
