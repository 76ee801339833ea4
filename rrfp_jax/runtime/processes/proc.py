"""What Linux tells of a process by its number."""

from __future__ import annotations

import socket
from pathlib import Path

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
