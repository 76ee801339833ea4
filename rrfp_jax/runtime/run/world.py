"""The processes of a run, as one of them sees them.

`World` is the face of several parts, each with a file of its own:

- `membership.py`: who there is, and who is gone;
- `mailbox.py`: messages between the processes, signs of life, and rank 0's clock;
- `recorder.py`: what this process last did;
- `collectives.py`: what all do together; `waits.py`: what the main thread waits for, and how long;
- `signals.py`: whether the run is to stop, and what is done when this process leaves it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from rrfp_jax.runtime.run.collectives import Collectives
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.membership import Membership
from rrfp_jax.runtime.run.recorder import FlightRecorder
from rrfp_jax.runtime.run.signals import ExitCallbacks, Stop
from rrfp_jax.runtime.run.token import Store
from rrfp_jax.runtime.run.waits import Waits

START_SECONDS = 3600.0
"""Limit for all processes to have compiled: one may have much more to compile than another."""


class World:
    """The processes of this run.

    Args:
        rank, size: of this process, and how many there are.
        mailbox: to the others; None when alone.
        folder: in which the launcher collects what ranks leave, as it was named at the start; None
            without one.
        recorder: of what this process last did.
        store: the run's key-value store, sealed; None when alone.

    Attributes:
        folder_descriptor: of the folder; it still leads there when that has been renamed.
        membership: who takes part in the run.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        mailbox: Mailbox | None = None,
        folder: Path | None = None,
        recorder: FlightRecorder | None = None,
        store: Store | None = None,
    ) -> None:
        self.rank, self.size, self.mailbox, self.store = rank, size, mailbox, store
        self.folder = folder
        self.folder_descriptor = None if folder is None else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.recorder = recorder or FlightRecorder(None, rank, "")
        self.stop, self.leaving = Stop(), ExitCallbacks()
        others = [other for other in range(size) if other != rank]
        self.membership = mailbox.membership if mailbox else Membership(rank, others, perf_counter())
        self.describe = self.membership.describe
        self.waits = Waits(rank, self.describe)
        self.waits_for = self.waits.waits_for
        self.collectives = Collectives(self.membership, mailbox, self.waits, self.stop)
        self.gather, self.agree = self.collectives.gather, self.collectives.agree
        self.await_ready = self.collectives.await_ready
        self._rounds = 0

    def has_folder(self, folder: Path) -> bool:
        """Whether a folder is the one in which the launcher collects what ranks leave."""
        if self.folder_descriptor is None:
            return False
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.folder_descriptor), folder.stat())
        return False

    def run_stages(self, stages: Sequence[str], own: Collection[int] = ()) -> None:
        """Say which stages each rank runs, as text, and this one's numbers, once a mesh has been laid out."""
        self.membership.stages = stages
        self.recorder.runs(stages[self.rank], own)

    def next_round(self) -> int:
        """A number for the next run of tasks, equal on all processes, which all run the same."""
        self._rounds += 1
        return self._rounds

    @property
    def clock(self) -> tuple[float, float]:
        """What to add to a `perf_counter` time of this process to have it on rank 0's, and how wrong (s)."""
        clock = self.membership.clock
        return clock.offset, clock.precision
