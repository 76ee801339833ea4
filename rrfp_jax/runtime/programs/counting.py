"""How many programs have been compiled, told to a listener while it lasts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeAlias

from rrfp_jax.progress import Doing, Progress

Job: TypeAlias = tuple[Any, ...]
"""A bucket, and whatever else tells jobs apart."""


class Counting:
    """Counts programs while they are compiled by several threads. Use as a context manager.

    Args:
        progress: is told.
        expected: number of programs at most, by job; other jobs count nothing.
    """

    def __init__(self, progress: Progress, expected: Mapping[Any, int]) -> None:
        self._progress, self._expected = progress, dict(expected)  # of jobs that have not ended
        self._buckets = len({bucket for bucket, *_ in expected})
        self._done, self._total = 0, sum(expected.values())
        self._lock = threading.Lock()  # a listener is called by one thread at a time

    def __enter__(self) -> Counting:
        if self._total:
            self._tell()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with self._lock:
            if self._done < self._total:  # an error: it ends here
                self._done = self._total
                self._tell()

    def one_more(self, job: Job) -> None:
        """A program of this job is there; the last one is told of by `ended`."""
        with self._lock:
            self._done += 1
            self._expected[job] -= 1
            if self._done < self._total:
                self._tell()

    def ended(self, job: Job) -> None:
        """This job has all its programs; those that would compute nothing are none."""
        with self._lock:
            if job in self._expected:
                self._total -= self._expected.pop(job)
                if self._done < self._total or not self._expected:
                    self._tell()

    def _tell(self) -> None:
        under_way = {bucket for bucket, *_ in self._expected}
        current = min(self._buckets - len(under_way) + 1, self._buckets)
        detail = f"bucket {current} of {self._buckets}" if self._buckets > 1 else ""
        self._progress(Doing("compiling", self._done, self._total, detail))
