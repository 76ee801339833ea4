"""Files that nobody but their user can have written, in a folder of the user's own.

Whoever may write into a folder can put a file there, or exchange one between two looks at it. So the open
file is asked, never its name. It and its folder must belong to this user, and nobody else may write them. And
the file must begin with a seal: a hash of its name and its content that takes a key which only this user can
read. Nothing of the content is handed out before the seal holds.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from rrfp_jax.fields import expanded
from rrfp_jax.files import OTHERS_READ, OTHERS_WRITE, open_own, require_own

KEY_FILE = "RRFP_KEY_FILE"

KEY = SEAL = 32  # bytes

PART = ".part"
"""Ends the name of a file that is being written."""


class NotSealed(Exception):
    """Somebody else may have written a file, or there is no key to tell; the text says why."""


class SealedFiles:
    """See above. Several threads and processes may read and write at once.

    Args:
        folder: of the files; made when something is written, for this user alone.
        environment: variables of this process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self._key: bytes | None = None

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none.

        Raises:
            NotSealed: somebody else may have written it, or it is damaged.
            OSError: it cannot be read.
        """
        try:
            with self._opened() as folder, os.fdopen(self._open(name, folder), "rb") as file:
                found = file.read()
                with suppress(OSError):  # on a file system that can only be read
                    os.utime(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return None
        seal, content = found[:SEAL], found[SEAL:]
        if not hmac.compare_digest(seal, self._seal(name, content)):
            raise NotSealed("it is damaged, or not sealed with this user's key")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all.

        Raises:
            NotSealed: somebody else may write into the folder, or there is no key.
            OSError: it cannot be written.
        """
        seal = self._seal(name, content)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = f".{secrets.token_hex(8)}{PART}"
        with self._opened() as folder:
            try:
                made = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
                with os.fdopen(made, "wb") as out:
                    out.write(seal + content)
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise

    def remove_unused(self, ending: str, oldest: float) -> None:
        """Remove what has not been used since a time (s), as far as that is allowed.

        Args:
            ending: of the files' names. What was being written when its process was killed goes, too.
            oldest: in the seconds of `time.time()`.
        """
        with suppress(OSError, ValueError, NotSealed), self._opened() as folder:
            for name in os.listdir(folder):
                with suppress(OSError):  # several processes may do this at once
                    used = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                    if name.endswith((ending, PART)) and used < oldest:
                        os.unlink(name, dir_fd=folder)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder's descriptor."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            require_own(folder, OTHERS_WRITE)
        except PermissionError as error:
            os.close(folder)
            reason = f"its folder {self.folder} is not safe, {error.strerror}: chmod 700, or use another"
            raise NotSealed(reason) from None
        try:
            yield folder
        finally:
            os.close(folder)

    def _open(self, name: str, folder: int) -> int:
        try:
            return open_own(name, OTHERS_WRITE, folder)
        except PermissionError as error:
            raise NotSealed(error.strerror) from None

    def _seal(self, name: str, content: bytes) -> bytes:
        if self._key is None:  # two threads may both look: they find the same
            self._key = user_key(self._environment)
        return hmac.digest(self._key, len(name).to_bytes(4, "big") + name.encode() + content, sha256)


def user_key(environment: Mapping[str, str]) -> bytes:
    """The user's key: in the file that RRFP_KEY_FILE names, or in the user's own folder.

    It is made if there is none, by one process if several want to.

    Raises:
        NotSealed: it can neither be read nor made, or others can read it.
    """
    path = None
    try:
        given = environment.get(KEY_FILE)
        path = expanded(KEY_FILE, given) if given else Path.home() / ".rrfp" / "programs.key"
        with suppress(FileNotFoundError):
            return _read_key(path)
        _make_key(path)
        return _read_key(path)
    except (OSError, RuntimeError, ValueError) as error:  # no home; a name with NUL
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise NotSealed(
            f"the key that seals programs, {path or '~/.rrfp/programs.key'}: {why}; let {KEY_FILE} name a "
            f"file in a folder of your own, or remove a key that is not right"
        ) from None


def _read_key(path: Path) -> bytes:
    with os.fdopen(open_own(path, OTHERS_READ | OTHERS_WRITE), "rb") as file:
        key = file.read(KEY + 1)
    if len(key) != KEY:
        raise ValueError(f"it has not {KEY} bytes")
    return key


def _make_key(path: Path) -> None:
    """Whole or not at all, and never in the place of another: a link to a name that there is fails."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, suffix=PART)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_bytes(KEY))
        with suppress(FileExistsError):  # another process was faster
            os.link(part, path)
    finally:
        os.unlink(part)
