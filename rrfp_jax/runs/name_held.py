"""Takes a run's name: its rank 0 holds `<directory>/.<name>.lock` for as long as it lives.

The lock is the kernel's (`flock`), which takes it back when a process dies: a killed run is in nobody's way.
The file says who has it, and is removed at the end. If somebody deletes it meanwhile, a second run is refused
by the lock on the run's folder (`used_folder`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable
from rrfp_jax.files import is_used, read_whole
from rrfp_jax.name_lock import lock_of, lock_within
from rrfp_jax.printing import Say
from rrfp_jax.runtime.run.signals import undone
from rrfp_jax.runtime.run.world import START_SECONDS, World

LONGEST_HOLDER = 1024
"""Bytes that the file may have."""

ASKED_SECONDS = 0.05
"""Whoever asks (`hold_on`) has the lock for some microseconds; a run asks again for so long."""


@contextmanager
def name_held(world: World, folder: Path, say: Say) -> Iterator[None]:
    """Inside, no other run can take this name; UsageError if a live one has it. All processes together."""
    with ExitStack() as stack:
        lock, holder = lock_of(folder), ""
        if world.rank == 0:
            try:
                stack.enter_context(_locked(lock))
                if is_used(folder) and not world.has_folder(folder):
                    holder = f"another process, whose lock file {lock.name} somebody has deleted"
            except BlockingIOError:
                with suppress(OSError):
                    holder = printable(read_whole(lock, LONGEST_HOLDER).decode(errors="replace").strip())
                holder = holder or "another process"
            except OSError as error:
                say(f"{lock} cannot be locked ({error.strerror}): start no other run of this name meanwhile")
        holder = world.gather("whether the run's name is free", holder, START_SECONDS)[0]
        if holder:
            raise UsageError(f"{folder} is being trained by {holder}: give another --config.name, or stop it")
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is there meanwhile, as are the directories above it."""
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _lock(path)
        with undone(partial(os.close, descriptor)):  # by children, too: else one would hold the lock
            try:
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                with suppress(OSError):  # a full disk: the lock holds all the same
                    os.ftruncate(descriptor, 0)
                    holder = f"process {os.getpid()} on {socket.gethostname()} (since {since})\n"
                    os.write(descriptor, holder.encode())
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _lock(path: Path) -> int:
    """The descriptor of the file, locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            lock_within(ASKED_SECONDS, descriptor, fcntl.LOCK_EX)
            # Else whoever had the lock has removed this file since: there is another by now.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return os.dup(descriptor)  # which keeps the lock
        finally:
            os.close(descriptor)
