"""Where the threads of a process are in Python: taken by itself, or read from what `faulthandler` dumped."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Literal, NamedTuple, TypeAlias

from rrfp_jax.authors import author_of

Whose: TypeAlias = Literal["user", "ours", "library"]

LOADER = "rrfp-load"
"""The name of the thread that loads the next step's data."""

MOST_FRAMES = 60
"""Of a thread, the innermost."""

DUMPED_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
DUMPED_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Frame(NamedTuple):
    """A line that is being executed; `file` as Python has it."""

    file: str
    line: int
    function: str

    @property
    def whose(self) -> Whose:
        """Who has written it."""
        author = author_of(self.file)
        return author if author in ("user", "ours") else "library"

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class Thread(NamedTuple):
    """A thread of a process.

    Attributes:
        name: as Python has it; a number if only that is known.
        is_main: whether it is the main thread.
        frames: where it is, innermost first.
    """

    name: str
    is_main: bool
    frames: tuple[Frame, ...]

    @property
    def users(self) -> Frame | None:
        """The user's innermost line, if the thread is in that, or in what that calls of other libraries."""
        for frame in self.frames:
            if frame.whose != "library":
                return frame if frame.whose == "user" else None
        return None

    @property
    def is_users_own(self) -> bool:
        """Whether the user's program has started it, and no other library has: none of ours waits for it."""
        if not self.frames or self.frames[-1].function != "_bootstrap":
            return False  # the main one, or one of a runtime that calls back
        others = [frame.whose for frame in self.frames if frame.whose != "library"]
        return others[-1:] == ["user"]


def own_threads() -> list[Thread]:
    """The threads of this process, but for the one that asks; the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, me = threading.main_thread().ident, threading.get_ident()
    found = []
    for number, innermost in sys._current_frames().items():
        if number != me:
            frames: list[Frame] = []
            at: FrameType | None = innermost
            while at is not None and len(frames) < MOST_FRAMES:
                frames.append(Frame(at.f_code.co_filename, at.f_lineno, at.f_code.co_name))
                at = at.f_back
            found.append(Thread(names.get(number, str(number)), number == main, tuple(frames)))
    return sorted(found, key=lambda thread: (not thread.is_main, thread.name))


def dumped_threads(lines: Iterable[str]) -> Sequence[Thread]:
    """The threads of the last dump of `faulthandler`; the main one is where `<module>` is outermost."""
    found: list[tuple[str, list[Frame]]] = []
    for line in lines:
        if thread := DUMPED_THREAD.match(line):
            if any(name == thread[1] for name, _ in found):  # another dump begins
                found.clear()
            found.append((thread[1], []))
        elif found and (frame := DUMPED_FRAME.match(line)):
            found[-1][1].append(Frame(frame[1], int(frame[2]), frame[3]))
    return [
        Thread(name, bool(frames) and frames[-1].function == "<module>", tuple(frames))
        for name, frames in found
    ]
