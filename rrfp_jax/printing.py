"""Prints for people who may not be there: a stream that is closed, broken or full is no reason to end a run.

Imports nothing of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, TypeAlias

Say: TypeAlias = Callable[[str], None]
"""Tells whoever is there some lines."""

CANNOT_PRINT = (AttributeError, OSError, ValueError)
"""Raised for streams that are None, broken or full, and closed."""


def say(text: str) -> None:
    """Print lines to standard output at once, in one piece: another thread may be printing, too."""
    _write(sys.stdout, f"{text}\n")


def warn(text: str, end: str = "\n") -> None:
    """The same to standard error."""
    _write(sys.stderr, f"{text}{end}")


def is_terminal() -> bool:
    """Whether standard output is one."""
    try:
        return sys.stdout.isatty()
    except CANNOT_PRINT:
        return False


def write_bytes(text: bytes) -> None:
    """Write to standard output as it is."""
    _write(getattr(sys.stdout, "buffer", None), text)


def occupy_streams() -> None:
    """Give a command the three streams that it was started without: files that it opens must not be those."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def settle_streams() -> None:
    """Print what waits; what cannot be printed is let go, so that Python's end does not fail of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except CANNOT_PRINT:
            _let_go(stream)


class Lenient:
    """A stream for those who print by themselves, such as rich: what cannot be printed is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text at once; how long it is."""
        _write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Nothing: all is written at once."""


def _write(stream: Any, text: Any) -> None:
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
        stream.flush()
    except BrokenPipeError:
        _let_go(stream)
    except CANNOT_PRINT:  # such as a disk that is full for now
        return


def _let_go(stream: Any) -> None:
    """Have a stream lead nowhere from now on; what waits in it would fail again at Python's end."""
    with suppress(*CANNOT_PRINT), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
        stream.flush()
