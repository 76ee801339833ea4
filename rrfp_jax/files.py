"""What several rooms do with files and folders. Imports nothing of ours."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE, OTHERS_READ = 0o022, 0o044
"""Bits of a file's mode."""


def move_away(folder: Path) -> Path:
    """Rename a folder to the first free `<name>.<number>`, which is returned."""
    number = 1
    while (new := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(new)


def open_own(path: str | Path, refused: int, folder: int | None = None) -> int:
    """Open a file of this user for reading; the descriptor of it.

    What was opened is asked, not its name, which may be another file's by then.

    Args:
        path: of the file.
        refused: bits of the mode that it must not have, such as `OTHERS_WRITE`.
        folder: descriptor of the folder that the path begins at; None for the current one.

    Raises:
        OSError: it cannot be opened, or is no file.
        PermissionError: it belongs to another user, or others may read or write it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)  # a pipe must not be waited for
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        require_own(descriptor, refused)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_own(descriptor: int, refused: int) -> None:
    """Refuse what another user owns, or has bits in its mode that it must not have.

    Raises:
        PermissionError: saying which.
    """
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if found.st_mode & refused:
        may = "read" if found.st_mode & refused & OTHERS_READ else "write"
        raise PermissionError(errno.EPERM, f"others may {may} it (mode {stat.S_IMODE(found.st_mode):o})")
