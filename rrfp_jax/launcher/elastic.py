"""What each attempt at a run runs on: always all ranks, or replicas that are lost and replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rrfp_jax.launcher.replicas import Assignment, Slots
from rrfp_jax.runtime.lifecycle.host_memory import HostMemory

Say: TypeAlias = Callable[[str], None]


class Whole:
    """A run that needs all its ranks in every attempt.

    Args:
        count: of ranks.

    Attributes:
        is_elastic: whether an attempt may have fewer, and hand over.
    """

    is_elastic = False

    def __init__(self, count: int) -> None:
        self._count = count

    @property
    def slots(self) -> Sequence[int]:
        """By rank of the present attempt, or else of the next, the slot of the machine that it has."""
        return range(self._count)

    @property
    def environment(self) -> Mapping[str, str]:
        """What its ranks are told."""
        return {}

    def begin(self) -> None:
        """An attempt begins."""

    def look(self) -> None:
        """Ask the ranks to hand over once the time has come; to be called again and again."""

    def lost(self, ranks: Collection[int]) -> str:
        """These ranks of the attempt were lost; what follows, as the end of a sentence."""
        return ""

    def handed_over(self) -> str:
        """The ranks have made room for all replicas; what follows, as the end of a sentence."""
        raise AssertionError("nobody was asked to")

    def refused(self) -> str:
        """The run cannot be had with so few replicas; what follows, or nothing if it has all of them."""
        return ""

    def end(self, status: int, say: Say) -> bool:
        """No attempt follows; whether that saved what no rank could save.

        Args:
            status: with which the run ends.
            say: tells what is saved or lost.
        """
        return False


class Elastic(Whole):
    """The replicas of a run, from attempt to attempt.

    Args:
        needs: see `Slots`.
        seconds: from the first loss until all are replaced.
        folder: in the host's memory, for the states.
        save: is called with that at the end; see `Whole.end`.
    """

    is_elastic = True

    def __init__(
        self,
        needs: Mapping[int, int],
        seconds: float,
        folder: Path,
        save: Callable[[HostMemory, int, Say], bool],
    ) -> None:
        super().__init__(max(needs.values()))
        self._slots, self._seconds = Slots(needs=needs), seconds
        self._folder, self._save = folder, save
        self._replace_at = float("inf")
        self._assignment = self._next()

    @property
    def slots(self) -> Sequence[int]:
        """See `Whole`."""
        return self._assignment.slots

    @property
    def environment(self) -> Mapping[str, str]:
        """See `Whole`."""
        return self._memory.environment

    def begin(self) -> None:
        """See `Whole`; an earlier request to hand over is taken back."""
        self._memory.forget()

    def look(self) -> None:
        """See `Whole`."""
        if time.monotonic() >= self._replace_at:
            self._replace_at = float("inf")
            self._memory.ask()

    def lost(self, ranks: Collection[int]) -> str:
        """See `Whole`."""
        self._slots = self._slots.without(self._assignment, ranks)
        if not self._seconds:
            self._slots = self._slots.whole()
        self._assignment = self._next()
        whole, left = max(self._slots.needs), self._assignment.replicas
        if left == whole:
            self._replace_at = float("inf")
            return f" with all {whole} replicas"
        now = time.monotonic()
        self._replace_at = min(self._replace_at, now + self._seconds)
        return f" with {left} of {whole} replicas, with all again {self._replace_at - now:.0f} s later"

    def handed_over(self) -> str:
        """See `Whole`."""
        self._slots, self._replace_at = self._slots.whole(), float("inf")
        self._assignment = self._next()
        return f"goes on with all {self._assignment.replicas} replicas"

    def refused(self) -> str:
        """See `Whole`."""
        whole = max(self._slots.needs)
        if self._assignment.replicas == whole:
            return ""
        self._slots = self._slots.never(self._assignment.replicas).whole()
        return f"not with fewer replicas, then: {self.handed_over()}"

    def end(self, status: int, say: Say) -> bool:
        """See `Whole`."""
        return self._save(self._memory, status, say)

    @property
    def _memory(self) -> HostMemory:
        return HostMemory(self._folder, self._assignment.replicas)

    def _next(self) -> Assignment:
        if (found := self._slots.assignment) is not None:
            return found
        self._slots = self._slots.whole()  # nothing is left: all begin again
        found = self._slots.assignment
        assert found is not None
        return found
