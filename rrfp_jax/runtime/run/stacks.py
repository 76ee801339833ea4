"""Stacks of threads, and who used JAX first in this process, which after that can join no run."""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from itertools import islice
from traceback import walk_stack
from types import ModuleType
from typing import Any, Literal, NamedTuple

from rrfp_jax.authors import author_of, is_of

LOADER = "rrfp-load"
"""The name of the thread that loads the next step's data."""

MOST_FRAMES = 60
"""Most frames that are shown of a thread, the innermost."""

DUMPED_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
DUMPED_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackFrame(NamedTuple):
    """A line that is being executed; `file` as Python has it."""

    file: str
    line: int
    function: str

    @property
    def whose(self) -> Literal["user", "ours", "library"]:
        author = author_of(self.file)
        return author if author in ("user", "ours") else "library"

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class Thread(NamedTuple):
    """A thread of a process."""

    name: str  # as Python has it; a number if only that is known
    is_main: bool
    frames: tuple[StackFrame, ...]  # innermost first

    @property
    def users(self) -> StackFrame | None:
        """The user's innermost line, if the thread is in that, or in what that calls of other libraries."""
        first = next((frame for frame in self.frames if frame.whose != "library"), None)
        return first if first is not None and first.whose == "user" else None

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
            stack = islice(walk_stack(innermost), MOST_FRAMES)
            frames = (StackFrame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in stack)
            found.append(Thread(names.get(number, str(number)), number == main, tuple(frames)))
    return sorted(found, key=lambda thread: (not thread.is_main, thread.name))


def dumped_threads(lines: Iterable[str]) -> Sequence[Thread]:
    """The threads of the last dump of `faulthandler`; the main one is where `<module>` is outermost."""
    found: list[tuple[str, list[StackFrame]]] = []
    for line in lines:
        if thread := DUMPED_THREAD.match(line):
            if any(name == thread[1] for name, _ in found):  # another dump begins
                found.clear()
            found.append((thread[1], []))
        elif found and (frame := DUMPED_FRAME.match(line)):
            found[-1][1].append(StackFrame(frame[1], int(frame[2]), frame[3]))
    return [Thread(name, bool(own) and own[-1].function == "<module>", tuple(own)) for name, own in found]


PASSED_OVER = ("jax", "jaxlib", "flax")
"""Packages that use JAX because somebody calls them."""


class WhenImported:
    """A finder for `sys.meta_path`: as soon as JAX has been imported, `runtime/_jax.py` looks on."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        if (spec := importlib.util.find_spec("jax")) is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_look(module: ModuleType) -> None:
                execute(module)
                look_on()

            spec.loader.exec_module = then_look  # type: ignore[method-assign]
        return spec


def look_on() -> None:
    """Have the first use of JAX noted, from now on or as soon as JAX has been imported."""
    if "jax" not in sys.modules:
        sys.meta_path.insert(0, WhenImported())  # type: ignore[arg-type]
        return
    with suppress(ImportError, AttributeError):  # a version that we do not know, as whoever needs it will say
        import rrfp_jax.runtime._jax  # noqa: F401


def first_used(stack: Sequence[tuple[str, int, str]] | None) -> str:
    """Where JAX was used first, as a clause: the line that did it, and the user's own line behind it."""
    frames = [StackFrame(*one) for one in stack or ()]
    frames = [one for one in frames if one.whose != "ours" and not one.file.startswith("<frozen")]
    direct = next((one for one in frames if not any(is_of(one.file, name) for name in PASSED_OVER)), None)
    users = next((one for one in frames if one.whose == "user"), direct)
    if direct is None or users is None:
        return "by code that ran before `import rrfp_jax` (put that first, and this message names the line)"
    return f"by {_line(direct)}" + ("" if users == direct else f", reached from {_line(users)}")


def _line(frame: StackFrame) -> str:
    text = linecache.getline(frame.file, frame.line).strip()
    return f"{frame.file}:{frame.line}" + (f" (`{text}`)" if text else "")
