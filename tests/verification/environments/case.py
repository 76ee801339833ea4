"""One case of the table: a run in an odd environment, and how it must end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LAUNCHED = "$LAUNCH"
"""The named run of `run.py` in two processes."""
ALONE = "$TRAIN"
"""The same in one process."""
SCRIPT = "$SCRIPT"
"""`script.py` in two processes."""

SECONDS = 120.0
STEPS, EVERY = 8, 4
"""Steps of a run, and between two checkpoints of the named run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run in an environment."""

    name: str
    shell: str = LAUNCHED
    env: Mapping[str, str | None] = field(default_factory=dict)
    at_import: str = ""
    at_step: str = ""
    then: Mapping[str, str] = field(default_factory=dict)
    status: int | Collection[int] = 0
    says: Collection[str] = ()
    headline: str = ""
    silent: Collection[str] = ()
    steps: int | None = None
    checkpoint: int | None = None
    tracebacks: int = 0
    files: Collection[str] = ()
    seconds: float = SECONDS
    needs: Collection[str] = ()

    @property
    def statuses(self) -> Collection[int]:
        """Those that the shell may have."""
        return (self.status,) if isinstance(self.status, int) else self.status


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended."""

    status: int | None = None
    seconds: float = 0.0
    text: str = ""
    left: Collection[str] = ()
    faults: Collection[str] = ()
    missing: str = ""
