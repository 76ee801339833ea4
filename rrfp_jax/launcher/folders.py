"""Where a run's files are: a staging folder until the run begins, then `<directory>/<name>/`."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.files import first_free, is_used, move_away, staged
from rrfp_jax.name_lock import is_held, used_folder

ATTEMPT = (
    *("rank-*.log", "flight-*", "last-words-*.json", "diagnosis.txt"),
    *("testimony-*.json", "stacks-*.txt", "why.txt"),
)
"""What each attempt at a run leaves in its folder."""


def set_attempt_aside(folder: Path) -> Path:
    """Move what an attempt has left to the first free `attempt-<number>` in the run's folder, the result."""
    aside = first_free(folder / "attempt", "-")
    aside.mkdir()
    for pattern in ATTEMPT:
        for path in folder.glob(pattern):
            path.rename(aside / path.name)
    return aside


def remove_answers(folder: Path) -> None:
    """Remove what ranks left for those who looked at them, of a run that has ended well."""
    dumps = [path for path in folder.glob("stacks-*.txt") if not path.stat().st_size]
    for path in (*dumps, *folder.glob("testimony-*.json")):
        path.unlink(missing_ok=True)


class RunFolder:
    """`<directory>/.<name>.starting-<pid>`, which becomes `<directory>/<name>` when the run begins.

    Anyone may rename it, such as rank 0: it is known by its inode, so `path` finds it in either place. Those
    that killed launchers of the same name have left in staging are removed.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._use = ExitStack()
        try:
            self.final = directory.absolute() / name
            directory = self.final.parent
            self._made = [parent for parent in (directory, *directory.parents) if not parent.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            with used_folder(directory, fcntl.LOCK_EX):  # no other launcher makes or removes folders there
                for left in staged(self.final):
                    if is_used(left) is False:
                        shutil.rmtree(left, ignore_errors=True)
                staging = directory / f".{name}.starting-{os.getpid()}"
                # A killed launcher leaves its own, and process ids recur.
                self.staging = first_free(staging, ".") if staging.exists() else staging
                self.staging.mkdir()
                self._use.enter_context(used_folder(self.staging))
        except OSError as error:
            raise UsageError(
                f"{directory / name}: cannot be written: {error.strerror}; run in, or name, another directory"
            ) from error
        self._identity = _identity(self.staging)

    @property
    def path(self) -> Path:
        """Where it is now, in whatever run's name."""
        places = [self.staging, self.final, *sorted(self.final.parent.glob("*"))]
        return next((place for place in places if _identity(place) == self._identity), self.staging)

    @property
    def exists(self) -> bool:
        """Whether nobody has removed it."""
        return _identity(self.path) == self._identity

    @property
    def has_begun(self) -> bool:
        """Whether it has left its staging place."""
        return self.path != self.staging

    def begin(self) -> Path | None:
        """Move it from staging to its final place, unless a live run has that; a former one's new name."""
        if not self.exists or self.has_begun or is_held(self.final):
            return None
        earlier = move_away(self.final) if self.final.exists() else None
        self.staging.rename(self.final)
        return earlier

    def discard(self) -> None:
        """Remove it, and the directories that were made for it if nothing else is in them."""
        shutil.rmtree(self.path, ignore_errors=True)
        for directory in self._made:
            with suppress(OSError):
                directory.rmdir()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
