"""Data of the next step, planned and loaded on a thread while the present step runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set

from rrfp_jax.runtime._jax import adopt, settings_here
from rrfp_jax.runtime.library import Bucket
from rrfp_jax.train.data import Arrays, Data, Microbatch, bucket_of, load_checked, plan_step


class Loader:
    """Asks data for plans and arrays, for one step at a time, whichever thread it does that on.

    What fails ahead of its step is left to that step, which does it again on the main thread and fails there.

    Args:
        reads: the fields of a bucket that this process will load in training; none while that is not known.
    """

    def __init__(self, reads: Callable[[Bucket], Set[str]]) -> None:
        self._reads = reads
        self._ahead: _Ahead | None = None

    def plan(self, data: Data, step: int) -> Sequence[Microbatch]:
        """The checked plan of a step; raises as `plan_step` does."""
        ahead = self._of(data, step)
        return plan_step(data, step) if ahead is None or ahead.plan is None else ahead.plan

    def load(
        self, data: Data, step: int, plan: Sequence[Microbatch], fields: Sequence[Set[str]]
    ) -> Sequence[Arrays]:
        """These fields of each microbatch of a step; raises as `load_checked` does."""
        ahead = self._of(data, step)
        known = {} if ahead is None or ahead.plan is not plan else ahead.arrays
        found = []
        for j, names in enumerate(fields):
            arrays = known.get(j, {})
            found.append(arrays if arrays.keys() >= names else _loaded(data, step, j, plan[j], names))
        return found

    def begin(self, data: Data, step: int) -> None:
        """Begin with a step that will come next."""
        self.settle()
        self._ahead = _Ahead(data, step, self._reads)

    def settle(self) -> None:
        """Wait until nobody uses the data."""
        if self._ahead is not None:
            self._ahead.join()

    def _of(self, data: Data, step: int) -> _Ahead | None:
        self.settle()
        ahead = self._ahead
        return ahead if ahead is not None and ahead.data is data and ahead.step == step else None


class _Ahead:
    """The data of one step, on a thread of its own, which no process waits for at its end."""

    def __init__(self, data: Data, step: int, reads: Callable[[Bucket], Set[str]]) -> None:
        self.data, self.step = data, step
        self.plan: Sequence[Microbatch] | None = None
        self.arrays: dict[int, Arrays] = {}
        self._reads, self._settings = reads, settings_here()
        self._thread = threading.Thread(target=self._load, name="rrfp-load", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _load(self) -> None:
        adopt(self._settings)  # for data that is computed with JAX
        try:
            self.plan = plan_step(self.data, self.step)
            for j, planned in enumerate(self.plan):
                names = self._reads(bucket_of(planned.fields))
                self.arrays[j] = _loaded(self.data, self.step, j, planned, names)
        except BaseException:
            pass


def _loaded(data: Data, step: int, j: int, planned: Microbatch, names: Set[str]) -> Arrays:
    return load_checked(data, step, j, planned, frozenset(names)) if names else {}
