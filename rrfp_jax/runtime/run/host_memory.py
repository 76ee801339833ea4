"""What a launcher lends its ranks so that a run outlives one of them: a folder in the host's memory.

The ranks keep the state of their latest step there, and those of the next attempt go on from it, perhaps with
fewer replicas. While there are fewer the launcher may ask the ranks to hand over: they stop after a step, and
all replicas go on from the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.files import is_used
from rrfp_jax.runtime.run.name_lock import used_folder

FOLDER, REPLICAS = "RRFP_HOST_MEMORY", "RRFP_REPLICAS"

PLACE = Path("/dev/shm")
"""Where Linux shows the host's memory as files."""

LOCK_SECONDS = 60.0
"""Within which whoever makes a folder has locked it."""


@dataclass(frozen=True)
class HostMemory:
    """The host memory of one attempt."""

    folder: Path
    replicas: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> HostMemory | None:
        """What RRFP_HOST_MEMORY and RRFP_REPLICAS say; None if nothing was lent, UsageError for nonsense."""
        folder, replicas = (environment.get(name, "") for name in (FOLDER, REPLICAS))
        if not folder and not replicas:
            return None
        counts = replicas.isdecimal() and len(replicas) < 7 and int(replicas) > 0
        if not counts or not folder or not Path(folder).is_dir():
            raise UsageError(
                f"{FOLDER}={folder} {REPLICAS}={replicas}: no folder with a number of replicas; the launcher "
                f"sets both for its ranks, those started by hand need none: unset them"
            )
        return cls(Path(folder), int(replicas))

    @property
    def environment(self) -> dict[str, str]:
        return {FOLDER: str(self.folder), REPLICAS: str(self.replicas)}

    @property
    def states(self) -> Path:
        """The folder of the states, a checkpoint each."""
        return self.folder / "states"

    @property
    def is_asked_for(self) -> bool:
        """Whether the ranks are to hand over."""
        return self._request.exists()

    def make(self) -> None:
        """Make the folder again if somebody has removed it, for this user only."""
        self.folder.mkdir(0o700, exist_ok=True)

    def ask(self) -> None:
        """Have the ranks hand over, after the step after the present one."""
        self._request.touch()

    def forget(self) -> None:
        """Take an earlier request back."""
        self._request.unlink(missing_ok=True)

    @property
    def _request(self) -> Path:
        return self.folder / "hand-over"


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
    return replace(memory, folder=memory.folder.rename(memory.folder.with_name(f"rrfp-kept-{name}")))


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
