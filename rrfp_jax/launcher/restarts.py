"""When a failed run is started again, and on what: always all ranks, or replicas that are lost and replaced.

A run that fails at the same place each time would do so for ever. So restarts must bring it further: to a
training step that no attempt before had begun. After an attempt that did, the next one follows soon. After
one that did not, it follows later; after three of those in a row there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from rrfp_jax.errors import FAILED
from rrfp_jax.printing import Say
from rrfp_jax.runtime.run.host_memory import HostMemory

BACK_OFF_SECONDS = (1.0, 5.0, 30.0)
"""Wait before a restart, after none, one and two restarts in a row that brought the run no further."""

NO_STEP = -1


def after_attempt(
    status: int,
    reached: Sequence[int],
    most: int,
    back_off: Sequence[float] = BACK_OFF_SECONDS,
    before: int = 0,
) -> tuple[float | None, str]:
    """Seconds until the next attempt, None if there is none; and why, if how the run ended does not say.

    There is none if the run was refused or interrupted, as its latest status says.

    `reached` is the furthest training step that each attempt has begun, or NO_STEP; `before` counts restarts
    before these attempts; `back_off` has seconds to wait by the number of fruitless restarts.
    """
    if status != FAILED or most == 0:
        return None, ""
    if before + len(reached) - 1 >= most:
        return None, f"not restarted again: --max-restarts={most}"
    fruitless = 0  # restarts at the end that have brought the run no further than the attempts before them
    for number in range(1, len(reached)):
        fruitless = 0 if reached[number] > max(reached[:number]) else fruitless + 1
    if fruitless < len(back_off):
        return back_off[fruitless], ""
    where = "the first step" if max(reached) == NO_STEP else f"step {max(reached)}"
    return None, f"not restarted again: {fruitless} restarts brought it no further than {where}"


class Assignment(NamedTuple):
    """How many replicas of the model an attempt has, and by rank its slot of the machine."""

    replicas: int
    slots: Sequence[int]


def assigned(needs: Mapping[int, int], lost: Collection[int]) -> Assignment | None:
    """Assigns as many replicas as the slots that are left have room for; `needs` has ranks by replicas."""
    left = [slot for slot in range(max(needs.values())) if slot not in lost]
    most = max((n for n, ranks in needs.items() if ranks <= len(left)), default=None)
    return None if most is None else Assignment(most, tuple(left[: needs[most]]))


LEAST_WAIT = 1.0
"""Seconds until those who were lost again at once are brought back."""


class Elastic:
    """The replicas of a run, from attempt to attempt; all are replaced `seconds` after the first loss.

    States are in `folder`, in the host's memory; None for a run that needs all its ranks.
    """

    def __init__(
        self,
        needs: Mapping[int, int],
        seconds: float = inf,
        folder: Path | None = None,
        save: Callable[[HostMemory, int, Say], bool] = lambda *_: False,
    ) -> None:
        self._needs, self._seconds, self.most = needs, seconds, max(needs.values())
        self._folder, self._save = folder, save
        self._wait = seconds  # doubles as long as those who are brought back are lost at once
        self._lost: frozenset[int] = frozenset()  # slots
        self._replace_at = inf
        self._bring_back()

    @property
    def _assignment(self) -> Assignment:
        return assigned(self._needs, self._lost) or Assignment(0, ())

    @property
    def slots(self) -> Sequence[int]:
        """By rank of the present attempt, or else of the next, the slot of the machine that it has."""
        return self._assignment.slots

    @property
    def memory(self) -> HostMemory | None:
        """What the present attempt is lent; None for a run that needs all its ranks, and cannot hand over."""
        return None if self._folder is None else HostMemory(self._folder, self._assignment.replicas)

    def begin(self) -> None:
        """An attempt begins; an earlier request to hand over is taken back."""
        self._asked = False
        if (memory := self.memory) is not None:
            memory.make()
            memory.request.unlink(missing_ok=True)

    def look(self, say: Say) -> None:
        """Ask the ranks to hand over once the time has come; to be called again and again."""
        if self._asked or time.monotonic() < self._replace_at or (memory := self.memory) is None:
            return
        self._asked = True
        try:
            memory.request.touch()
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            say(f"the ranks cannot be asked to hand over: {why}; replicas come back after the next loss")

    def lost(self, ranks: Collection[int], stepped: bool, wait: float) -> str:
        """Ranks of an attempt were lost, which may have `stepped`; what follows, to end a sentence with."""
        if self._folder is None:
            return ""
        new = {self.slots[rank] for rank in ranks}
        if self._is_whole and stepped:
            self._wait = self._seconds
        elif self._tried & new:
            self._wait = max(2 * self._wait, LEAST_WAIT)
        self._lost |= new
        now = time.monotonic()
        if self._lost:
            self._replace_at = min(self._replace_at, now + self._wait)
        later = self._replace_at - (now + wait)
        if later <= 0 or not self.slots:
            self._bring_back()
        whole, left = max(self._needs), self._assignment.replicas
        if self._is_whole:
            return f" with all {whole} replicas"
        return f" with {left} of {whole} replicas, with all again {later:.0f} s later"

    def handed_over(self) -> str:
        """The ranks have made room for all replicas; what follows, as the end of a sentence."""
        self._bring_back()
        return f"continues with all {self._assignment.replicas} replicas"

    def refuses_fewer(self) -> bool:
        """The ranks have refused; whether that was with fewer replicas, which is not tried again."""
        if self._is_whole:
            return False
        self._needs = {n: ranks for n, ranks in self._needs.items() if n != self._assignment.replicas}
        return True

    def end(self, status: int, say: Say) -> bool:
        """No attempt follows; whether the latest state is on disk, which perhaps no rank could see to."""
        return self.memory is not None and self._save(self.memory, status, say)

    @property
    def _is_whole(self) -> bool:
        return self._assignment.replicas == max(self._needs)

    def _bring_back(self) -> None:
        """All slots are in use again; those that were lost are remembered as tried."""
        self._tried, self._lost, self._replace_at, self._asked = self._lost, frozenset[int](), inf, False
