"""What Linux tells of a process by its number."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rrfp_jax.files import read_whole

LONGEST_STAT = 4096
"""Bytes of `/proc/<pid>/stat`."""

STATE, START = 0, 19
"""Of what follows the program's name: places of the state's letter, and of the start in clock ticks."""


def start_of(pid: int) -> int | None:
    """When a process was started, in clock ticks after the machine was; None if it has ended, or unknown.

    With its number it tells a process from a later one that got the same number.
    """
    found = _stat(pid)
    return None if found is None or found[STATE] in "ZX" else int(found[START])


def is_stopped(pid: int) -> bool:
    """Whether it stands still: after SIGSTOP or Ctrl-Z."""
    found = _stat(pid)
    return found is not None and found[STATE] == "T"


def _stat(pid: int) -> list[str] | None:
    try:
        text = read_whole(Path(f"/proc/{pid}/stat"), LONGEST_STAT)
    except OSError:
        return None
    return text.rpartition(b")")[2].decode("ascii").split()


def host_name() -> bytes:
    """Of this machine, as flight recorders have it."""
    return socket.gethostname().encode()[:64]


def leave_file(folder: Path | int, name: str, content: Any) -> None:
    """Write plain data as JSON.

    Raises:
        OSError: it cannot be written.
    """
    where = folder if isinstance(folder, int) else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    part = f".{name}.part"
    try:
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=where)
        with os.fdopen(file, "w", encoding="ascii") as out:
            json.dump(content, out)
        os.replace(part, name, src_dir_fd=where, dst_dir_fd=where)
    finally:
        if where is not folder:
            os.close(where)


_given_up: list[Callable[[], object]] = []


def children_give_up(act: Callable[[], object]) -> None:
    """From now on forked children begin by calling this; what was asked for last is called first."""
    _given_up.append(act)


@contextmanager
def children_giving_up(act: Callable[[], object]) -> Iterator[None]:
    """Inside, forked children begin by calling this."""
    children_give_up(act)
    try:
        yield
    finally:
        with suppress(ValueError):  # a child has called it
            _given_up.remove(act)


def exit_now(status: int, *, also_waited_for: bool = False) -> NoReturn:
    """End this process without Python's way out, and the workers that `multiprocessing` would end with it."""
    try:
        if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
            for worker in multiprocessing.active_children():
                if worker.daemon or also_waited_for:
                    worker.terminate()
    finally:
        os._exit(status)


def _give_up() -> None:
    while _given_up:
        with suppress(OSError):
            _given_up.pop()()


os.register_at_fork(after_in_child=_give_up)
