"""What a living process says of itself when it is asked: what it waits for, and where its threads are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rrfp_jax.json_files import Unreadable, read_json
from rrfp_jax.runtime.processes.left_file import leave_file
from rrfp_jax.runtime.processes.stacks import Thread


@dataclass(frozen=True, kw_only=True)
class Testimony:
    """An answer of a rank.

    Attributes:
        rank: of the process.
        number: of the question that it answers.
        waiting: what the main thread waits for, each such as "input of F3 on stage 2, since 2.1 s".
        waited: for how many seconds without progress; 0 if it waits for nothing.
        whom: the ranks that it waits for, if it knows them.
        gathers: how many it has begun, each of which tells its value to the others.
        threads: where they are; the main one first.
    """

    rank: int
    number: int
    waiting: tuple[str, ...]
    waited: float
    whom: tuple[int, ...]
    gathers: int
    threads: tuple[Thread, ...]

    def write(self, folder: int) -> None:
        """Leave it as `testimony-<rank>.json` in a folder.

        Raises:
            OSError: it cannot be written.
        """
        leave_file(folder, _name(self.rank), asdict(self))


def read_testimony(folder: Path, rank: int) -> Testimony | None:
    """The latest of a rank; None if there is none that can be read."""
    try:
        return read_json(folder / _name(rank), Testimony)
    except Unreadable:
        return None


def _name(rank: int) -> str:
    return f"testimony-{rank}.json"
