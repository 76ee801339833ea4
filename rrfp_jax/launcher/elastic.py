"""A run whose replicas are lost and replaced: what each attempt runs on, and when the lost ones come back."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from rrfp_jax.launcher.replicas import Assignment, Slots
from rrfp_jax.runtime.lifecycle.host_memory import HostMemory


class Elastic:
    """The replicas of a run, from attempt to attempt.

    Args:
        needs: see `Slots`.
        seconds: from the first loss until all are replaced.
        folder: in the host's memory, for the states.
    """

    def __init__(self, needs: Mapping[int, int], seconds: float, folder: Path) -> None:
        self._slots, self._seconds, self._folder = Slots(needs=needs), seconds, folder
        self._replace_at = float("inf")
        self._assignment = self._next()

    @property
    def assignment(self) -> Assignment:
        """Of the present attempt, or else of the next."""
        return self._assignment

    @property
    def memory(self) -> HostMemory:
        """That its ranks are lent."""
        return HostMemory(self._folder, self._assignment.replicas)

    def look(self) -> None:
        """Ask the ranks to hand over once the time has come; to be called again and again."""
        if time.monotonic() >= self._replace_at:
            self._replace_at = float("inf")
            self.memory.ask()

    def lost(self, ranks: Collection[int]) -> str:
        """These ranks of the attempt were lost; what follows, as the end of a sentence."""
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
        """The ranks have made room for all replicas; what follows, as the end of a sentence."""
        self._slots, self._replace_at = self._slots.whole(), float("inf")
        self._assignment = self._next()
        return f"goes on with all {self._assignment.replicas} replicas"

    def refused(self) -> str:
        """The run cannot be had with so few replicas; what follows, or nothing if it has all of them."""
        whole = max(self._slots.needs)
        if self._assignment.replicas == whole:
            return ""
        self._slots = self._slots.never(self._assignment.replicas).whole()
        return f"not with fewer replicas, then: {self.handed_over()}"

    def _next(self) -> Assignment:
        if (found := self._slots.assignment) is not None:
            return found
        self._slots = self._slots.whole()  # nothing is left: all begin again
        found = self._slots.assignment
        assert found is not None
        return found
