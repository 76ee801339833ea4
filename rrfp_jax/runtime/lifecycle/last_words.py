"""What a process says when it ends badly, as a file that the launcher reads."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from rrfp_jax.json_files import Unreadable, as_kind, parse_json, read_json
from rrfp_jax.runtime.processes.left_file import leave_file

WORDS = "\x1d"
"""How a printed line of last words begins, ASCII's group separator; its launcher shows no such line."""

LONGEST_LINE = 60_000
"""Characters of such a line, of which the launcher waits for 65,536; a longer traceback is left out."""

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

    def line(self) -> str:
        """The same as a line, for when no file can be written: a full disk, a folder that was removed."""
        text = json.dumps(asdict(self))
        if len(text) > LONGEST_LINE:
            text = json.dumps(asdict(replace(self, traceback=None)))
        return f"{WORDS}{text}"


def words_in(line: bytes) -> LastWords | None:
    """The last words that a printed line holds; None if it holds none."""
    if not line.startswith(WORDS.encode()):
        return None
    try:
        return as_kind(parse_json(line.removeprefix(WORDS.encode())), LastWords)
    except ValueError:
        return None


def read_all(folder: Path) -> dict[int, LastWords]:
    """The last words in a folder by rank; a file that holds none is passed over."""
    found = (_read(path) for path in sorted(folder.glob("last-words-*.json")))
    return {words.rank: words for words in found if words is not None}


def _read(path: Path) -> LastWords | None:
    try:
        return read_json(path, LastWords)
    except Unreadable:
        return None
