"""Who is at a run: by the lock of its name, `<directory>/.<name>.lock`, and by those of folders in use.

The locks are the kernel's (`flock`). Who takes a name is in `runs/name_held.py`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rrfp_jax.errors import UsageError
from rrfp_jax.files import opened_binary
from rrfp_jax.runtime.run.signals import undone

LOCK_SECONDS, TRY_SECONDS = 10.0, 0.01
"""Launchers lock the folder that runs are in for milliseconds; another asks again for so long, so often."""


class Hold(NamedTuple):
    """A run has a name."""

    since: float
    certain: bool


def hold_on(folder: Path) -> Hold | None:
    """Who has the name of this folder; None if nobody has."""
    lock = lock_of(folder)
    try:
        with opened_binary(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError as error:
        certain = isinstance(error, BlockingIOError)
    with suppress(OSError):  # there is none, or it has ended meanwhile
        return Hold(lock.stat().st_mtime, certain)
    return None


def is_held(folder: Path) -> bool:
    """Whether a live run has the name of this folder."""
    hold = hold_on(folder)
    return hold is not None and hold.certain


def lock_of(folder: Path) -> Path:
    """The lock of the name that a run's folder has."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def used_folder(folder: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Inside, `is_used` is true of a folder, also once it has another name; without locks it never is.

    Raises:
        UsageError: another process has it, and keeps it: for good, if it is a live run's own folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with undone(partial(os.close, descriptor)):  # by children, too: else one would hold the lock
        try:
            lock_within(LOCK_SECONDS, descriptor, how)
        except BlockingIOError:
            raise UsageError(
                f"{folder} has been locked by another process for {LOCK_SECONDS:.0f} s, as a live run locks "
                "its own folder: name another directory, or end that process"
            ) from None
        except OSError:  # its file system has no locks
            pass
        yield


def lock_within(seconds: float, descriptor: int, how: int) -> None:
    """Lock what is open; BlockingIOError if others keep it for so long, OSError if there are no locks."""
    end = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(TRY_SECONDS)
