"""The folder in the host's memory that a launcher lends its ranks: how it is made, kept, and removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.files import is_used
from rrfp_jax.name_lock import used_folder
from rrfp_jax.runtime.run.host_memory import HostMemory

PLACE = Path("/dev/shm")
"""Where Linux shows the host's memory as files."""

LOCK_SECONDS = 60.0
"""Within which whoever makes a folder has locked it."""


@contextmanager
def lent_folder(place: Path = PLACE) -> Iterator[Path]:
    """A new folder in the host's memory, removed at the end, as are those that killed launchers have left."""
    prefix = f"rrfp-{os.getuid()}-"
    try:
        for left in place.glob(f"{prefix}*"):
            _remove_left(left)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    except OSError as error:
        raise UsageError(
            f"{place}: no folder can be made in the host's memory ({error.strerror}): start the run without "
            f"--replace-after, or mount a tmpfs there"
        ) from None
    with used_folder(folder, fcntl.LOCK_EX):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def outlives_launcher(memory: HostMemory) -> HostMemory:
    """Have a lent folder stay when its launcher ends, and the next one begins; where it is then."""
    name = memory.folder.name.removeprefix("rrfp-")
    return memory._replace(folder=memory.folder.rename(memory.folder.with_name(f"rrfp-kept-{name}")))


def _remove_left(folder: Path) -> None:
    """Remove the folder of a launcher that no longer lives: the kernel has taken its lock back."""
    with suppress(OSError):
        found = folder.lstat()
        changed = found.st_mtime
        with suppress(FileNotFoundError):  # a folder that ranks have made again is not locked
            changed = max(changed, (folder / "states").lstat().st_mtime)
        is_old = found.st_uid == os.getuid() and time.time() - changed >= LOCK_SECONDS
        if is_old and is_used(folder) is False:
            shutil.rmtree(folder, ignore_errors=True)
