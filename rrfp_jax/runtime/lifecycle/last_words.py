"""What a process says when it ends badly, as a file that the launcher reads."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rrfp_jax.json_files import Unreadable, read_json
from rrfp_jax.runtime.processes.left_file import leave_file

Why = Literal["failed", "refused", "peer lost", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """Why a rank ended.

    Attributes:
        rank: of the process.
        stages: that it ran, as text: "stage 2", "stages 2-3".
        kind: "failed" by its own fault, "refused" what it was asked, "peer lost", or "interrupted".
        sentence: the reason: for "failed", the exception as `ValueError: ...`.
        doing: what it was at, such as "in step 12".
        waiting: what it waited for, each such as "input of F3 on stage 2 in step 12, since 2.1 s".
        culprit: the rank whose loss ended it, if one did.
        traceback: of its own failure.
        time: when, in the seconds of `time.time()`.
    """

    rank: int
    stages: str
    kind: Why
    sentence: str
    doing: str = ""
    waiting: tuple[str, ...] = ()
    culprit: int | None = None
    traceback: str | None = None
    time: float = field(default_factory=time.time)

    def write(self, folder: Path | int) -> None:
        """Write `last-words-<rank>.json`, whole or not at all.

        Args:
            folder: its path, or an open descriptor of it, which still leads there after it was renamed.

        Raises:
            OSError: it cannot be written.
        """
        leave_file(folder, f"last-words-{self.rank}.json", asdict(self))


def read_all(folder: Path) -> dict[int, LastWords]:
    """The last words in a folder by rank; a file that holds none is passed over."""
    found = (_read(path) for path in sorted(folder.glob("last-words-*.json")))
    return {words.rank: words for words in found if words is not None}


def _read(path: Path) -> LastWords | None:
    try:
        return read_json(path, LastWords)
    except Unreadable:
        return None
