"""Plans and loads the next step's data on a thread while the present step runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

from msgspec.structs import replace

from rrfp_jax.core.step_rules import Bucket
from rrfp_jax.data.contract import Arrays, Data, Microbatch, buckets_of, load_checked, plan_hash, plan_step
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime._jax import adopt, settings_here
from rrfp_jax.runtime.run.stacks import LOADER
from rrfp_jax.runtime.run.waits import LONGEST_SLEEP_SECONDS, ForData
from rrfp_jax.runtime.run.world import World


class StepPlan(NamedTuple):
    """The checked plan of a step, and what follows from it alone."""

    microbatches: Sequence[Microbatch]
    buckets: list[Bucket]
    hash: str


class Loader:
    """Asks data for plans and arrays, for one step at a time, whichever thread it does that on.

    What fails ahead of its step is left to that step, which does it again on the main thread and fails there.
    """

    def __init__(self, reads: Callable[[Bucket, int], Set[str]], world: World) -> None:
        self._reads = reads
        self._world, self._request = world, _Request()
        self._ahead: _Ahead | None = None
        self._thread: threading.Thread | None = None  # from the first step that is loaded ahead
        self._todo: SimpleQueue[_Ahead | None] = SimpleQueue()  # of that thread

    def plan(self, data: Data, step: int) -> StepPlan:
        """The plan of a step; raises as `plan_step` and `settle` do."""
        with self._world.waits_for(self._request.awaited):
            if (ahead := self._ahead) is not None:
                self.settle()
                if ahead.data is data and ahead.step == step and ahead.plan is not None:
                    return ahead.plan
            return self._request.plan(data, step)

    def load(self, data: Data, step: int, plan: StepPlan, fields: Sequence[Set[str]]) -> Sequence[Arrays]:
        """These fields of each microbatch of a step; raises as `load_checked` and `settle` do."""
        with self._world.waits_for(self._request.awaited):
            if (ahead := self._ahead) is not None:
                self.settle()
            known = {} if ahead is None or ahead.plan is not plan else ahead.arrays
            found = []
            for j, names in enumerate(fields):
                arrays = known.get(j, {})
                if not arrays.keys() >= names:
                    arrays = self._request.load(data, step, j, plan.microbatches[j], names)
                found.append(arrays)
            return found

    @property
    def loaded(self) -> StepPlan | None:
        """The plan of the step whose data is there, loaded ahead."""
        ahead = self._ahead
        if ahead is None or ahead.plan is None or not ahead.ended.is_set():
            return None
        return ahead.plan if len(ahead.arrays) == len(ahead.plan.buckets) else None

    def begin(self, data: Data, step: int, settings: Any = None) -> None:
        """Begin with a step that will come next, under JAX's settings here, or those. Raises as `settle`."""
        self.settle()
        if self._thread is None or not self._thread.is_alive():  # a forked child has none of its own
            todo: SimpleQueue[_Ahead | None] = SimpleQueue()
            thread = threading.Thread(target=_work, args=(todo,), name=LOADER, daemon=True)
            thread.start()
            weakref.finalize(self, todo.put, None).atexit = False
            self._thread, self._todo = thread, todo
        given = settings_here() if settings is None else settings
        ahead = _Ahead(data, step, self._reads, self._request, given)
        self._todo.put(ahead)
        self._ahead = ahead

    def settle(self) -> None:
        """Wait until nobody uses the data; TrainingError if that takes longer than `stall_seconds`."""
        limit = self._world.waits.stall_seconds
        with self._world.waits_for(self._request.awaited) as wait:
            while self._ahead is not None and not self._ahead.ended.wait(min(LONGEST_SLEEP_SECONDS, limit)):
                if self._request.since > wait.since:
                    wait.progressed()
                elif wait.reached():
                    raise TrainingError(
                        f"{self._world.waits.given_up(*self._request.awaited())}: look at what the data does "
                        f"there, or allow more with stall_seconds, now {limit:g}"
                    )


class _Request:
    """What the data is asked for just now, by whichever thread, and since when (`perf_counter`)."""

    def __init__(self) -> None:
        self._what, self.since = ForData(), perf_counter()

    def plan(self, data: Data, step: int) -> StepPlan:
        """See `plan_step`."""
        self._what, self.since = ForData(call="plan", step=step), perf_counter()
        found = plan_step(data, step)
        return StepPlan(found, buckets_of(found), plan_hash(found))

    def load(self, data: Data, step: int, j: int, planned: Microbatch, names: Set[str]) -> Arrays:
        """See `load_checked`; nothing is asked for if no field is wanted."""
        if not names:
            return {}
        self._what, self.since = ForData(call="load", step=step, microbatch=j), perf_counter()
        return load_checked(data, step, j, planned, frozenset(names))

    def awaited(self) -> list[ForData]:
        """The same as the value of a wait."""
        return [replace(self._what, waited=perf_counter() - self.since)]


@dataclass(eq=False)
class _Ahead:
    """The data of one step, as a thread loads it."""

    data: Data
    step: int
    reads: Callable[[Bucket, int], Set[str]]
    request: _Request
    settings: Any  # of JAX
    plan: StepPlan | None = None
    arrays: dict[int, Arrays] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def load(self) -> None:
        """Ask for all of it; the step that needs what fails asks again, on the main thread."""
        try:
            before = adopt(self.settings)  # for data that is computed with JAX
            with suppress(BaseException):
                self.plan = plan = self.request.plan(self.data, self.step)
                for j, (planned, bucket) in enumerate(zip(plan.microbatches, plan.buckets, strict=True)):
                    names = self.reads(bucket, j)
                    self.arrays[j] = self.request.load(self.data, self.step, j, planned, names)
            adopt(before)
        finally:
            self.ended.set()


def _work(todo: SimpleQueue[_Ahead | None]) -> None:
    """Load one step after the other; a process does not wait for this at its end."""
    while (ahead := todo.get()) is not None:
        ahead.load()
        del ahead  # it knows the Trainer
