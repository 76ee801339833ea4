"""What several rooms do with files and folders. Imports nothing of ours."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import count
from pathlib import Path
from time import monotonic, sleep

OTHERS_WRITE, OTHERS_READ = 0o022, 0o044
"""Bits of a file's mode."""


def move_away(folder: Path) -> Path:
    """Rename a folder, or a file, to the first free `<name>.<number>`, which is returned."""
    return folder.rename(first_free(folder, "."))


def first_free(path: Path, mark: str) -> Path:
    """The first `<path><mark><number>` that is not there."""
    numbered = (path.with_name(f"{path.name}{mark}{number}") for number in count(1))
    return next(new for new in numbered if not new.exists())


def named(folder: Path, name: str, ending: str) -> list[Path]:
    """What a folder has under exactly this name and an ending, a regular expression; sorted."""
    wanted = re.compile(re.escape(name) + ending)
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if wanted.fullmatch(path.name))
    return []


MOVED_AWAY, STAGED = r"\.[1-9][0-9]*", r"\.starting-[0-9]+(\.[0-9]+)?"
"""Endings for `named`: of what `move_away` renamed, and of the hidden folder that a launcher prepares."""


def staged(run: Path) -> list[Path]:
    """The folders in which launchers prepare this run, or have left what they prepared."""
    return named(run.parent, f".{run.name}", STAGED)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write into, which takes the place of `path` once it is complete.

    Whoever has the earlier file open keeps its content. Links stay. Devices and pipes are written directly,
    and so is a file in a folder that takes no other.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    place = Path(os.path.realpath(path))
    exists = place.exists()
    if exists and not (place.is_file() and os.access(place.parent, os.W_OK)):
        yield place
        return
    if exists and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    part = place.with_name(f".{secrets.token_hex(8)}.part")  # `path` may have the longest name
    try:
        yield part
        if exists:
            shutil.copymode(place, part)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def open_regular(path: str | Path, folder: int | None = None) -> int:
    """Open a file for reading; the descriptor of it.

    Reading a pipe or a device might never end, so they are refused. What was opened is asked, not its name,
    which may be another file's by then.

    Args:
        path: of the file.
        folder: descriptor of the folder that the path begins at; None for the current one.

    Raises:
        OSError: it cannot be opened, or is something else; `strerror` says why.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
    except ValueError:  # of the name itself
        raise OSError(errno.EINVAL, "no file can have such a name", repr(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file, but a folder, a pipe or a device", str(path))
    return descriptor


def open_own(path: str | Path, refused: int, folder: int | None = None) -> int:
    """Open a file of this user for reading; the descriptor of it.

    Args:
        path: of the file.
        refused: bits of the mode that it must not have, such as `OTHERS_WRITE`.
        folder: descriptor of the folder that the path begins at; None for the current one.

    Raises:
        OSError: see `open_regular`.
        PermissionError: it belongs to another user, or others may read or write it.
    """
    descriptor = open_regular(path, folder)
    try:
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


def opened_binary(path: str | Path) -> BufferedReader:
    """A file, opened for reading, which its user closes; raises as `open_regular` does."""
    return os.fdopen(open_regular(path), "rb")


def read_whole(path: str | Path, most: int) -> bytes:
    """The content of a file of at most so many bytes.

    Raises:
        OSError: it cannot be read, is no file, or has more bytes; `strerror` says why.
    """
    with opened_binary(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than the {most} bytes that are read", str(path))
    return content


def read_end(path: str | Path, most: int) -> tuple[bytes, bool]:
    """The last bytes of a file, at most so many, and whether they are all of it.

    Raises:
        OSError: it cannot be read, or is no file; `strerror` says why.
    """
    with opened_binary(path) as file:
        begin = max(os.fstat(file.fileno()).st_size - most, 0)
        return os.pread(file.fileno(), most, begin), begin == 0


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk. OSError: it is full, as NFS may tell only now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(path: Path) -> None:
    """Have holes of a file lie on the disk, too: if it is full, `OSError` now, no signal at a later store."""
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def is_used(folder: Path) -> bool | None:
    """Whether a living process has a folder in use (`name_lock.used_folder`); None if that cannot be told."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return False


SEEN_SECONDS = 5.0
"""Within which another node sees a file. NFS asks its server for a name that it has not met: at once."""

LOOK_SECONDS = 0.1


def is_seen(path: Path) -> bool:
    """Whether a file that another process, perhaps on another node, has made is here, or comes."""
    deadline = monotonic() + SEEN_SECONDS
    with suppress(OSError):  # another process of this node does the same just now, or the folder is none
        try:
            path.parent.mkdir()  # which asks the server, where a look would be answered from a cache
            path.parent.rmdir()
        except FileExistsError:
            # NFS may answer either question from a cache of its own.
            while not (path.exists() or path.name in os.listdir(path.parent)):
                if monotonic() >= deadline:
                    return False
                sleep(LOOK_SECONDS)
            return True
    return False


def shown_path(path: Path) -> str:
    """A path as messages have it: from the working directory, if there is one."""
    try:
        return os.path.relpath(path)
    except OSError:  # it was deleted
        return str(path)
