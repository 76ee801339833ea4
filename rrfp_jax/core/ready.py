"""The ready tasks of one kind, best first in the paper's tie order (section 5, appendix A).

Forward: lowest chunk first; backward: highest chunk first; then the lowest microbatch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from rrfp_jax.core.tasks import FORWARD, Kind, Task


class ReadyQueue:
    """A sorted list of integer ranks, negated so that the best one is popped from the end in O(1)."""

    def __init__(self, kind: Kind, chunks: int, microbatches: int) -> None:
        self._kind = kind
        self._last_chunk = chunks - 1
        self._microbatches = microbatches
        self._keys: list[int] = []

    def add(self, task: Task) -> None:
        """File a task that has become ready."""
        insort(self._keys, self._key(task))

    def remove(self, task: Task) -> None:
        """Take out a ready task. Raises ValueError if it is not there."""
        at = self._find(task)
        if at is None:
            raise ValueError(f"{task} is not ready")
        del self._keys[at]

    def __contains__(self, task: Task) -> bool:
        return self._find(task) is not None

    def __iter__(self) -> Iterator[Task]:
        return (self._task(key) for key in reversed(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    def _find(self, task: Task) -> int | None:
        key = self._key(task)
        at = bisect_left(self._keys, key)
        return at if at < len(self._keys) and self._keys[at] == key else None

    def _key(self, task: Task) -> int:
        chunk = task.chunk if self._kind is FORWARD else self._last_chunk - task.chunk
        return -(chunk * self._microbatches + task.microbatch)

    def _task(self, key: int) -> Task:
        chunk, microbatch = divmod(-key, self._microbatches)
        return Task(self._kind, chunk if self._kind is FORWARD else self._last_chunk - chunk, microbatch)
