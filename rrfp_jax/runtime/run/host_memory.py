"""What a launcher lends its ranks so that a run outlives one of them: a folder in the host's memory.

The ranks keep the state of their latest step there, and those of the next attempt go on from it, perhaps with
fewer replicas. While there are fewer the launcher may ask the ranks to hand over: they stop after a step, and
all replicas go on from the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rrfp_jax.errors import UsageError

FOLDER, REPLICAS = "RRFP_HOST_MEMORY", "RRFP_REPLICAS"


class HostMemory(NamedTuple):
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
    def request(self) -> Path:
        """A file that is there while the ranks are to hand over, after the step after the present one."""
        return self.folder / "hand-over"

    def make(self) -> None:
        """Make the folder again if somebody has removed it, for this user only."""
        self.folder.mkdir(0o700, exist_ok=True)
