"""Schedules: fixed orders, which are followed, and hints, which only rank what is ready.

A hint is a frozen object with two pure methods: `start()` gives its state at the beginning of a step, and
`choose(state, ready)` gives the task to run and the state after it, or None. It may ask `ready` for the
best ready task of a kind, or whether a given task is ready, and it decides nothing else: a task that
cannot run now is never seen by it, so a hint cannot wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rrfp_jax.core.tasks import BACKWARD, FORWARD, Kind, Placement, Task


class Runnable(Protocol):
    """The tasks that may be dispatched now: ready, admitted, and with room for their gradient."""

    def first(self, kind: Kind) -> Task | None:
        """The best runnable task of a kind in tie order, or None."""

    def __contains__(self, task: Task) -> bool: ...


class Hint(ABC):
    """Readiness first: the schedule ranks the ready tasks and never makes a stage wait."""

    def start(self) -> Any:
        """The hint's state at the beginning of a step: any immutable value."""
        return None

    @abstractmethod
    def choose(self, state: Any, ready: Runnable) -> tuple[Task, Any] | None:
        """The task to run now and the state once it has been dispatched; None if nothing is runnable."""


class FixedOrder(ABC):
    """A planned order, followed strictly: a stage waits for the next task of its list."""

    @abstractmethod
    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Every F and B of `stage` in the order in which they are dispatched.

        Raises:
            ValueError: the schedule is not defined for this placement.
        """


Schedule: TypeAlias = Hint | FixedOrder


@dataclass(frozen=True)
class BF(Hint):
    """Rounds of one ready B, then one ready F; with one direction ready, that one (paper, section 5)."""

    def start(self) -> Kind:
        """The direction whose turn it is."""
        return BACKWARD

    def choose(self, state: Kind, ready: Runnable) -> tuple[Task, Kind] | None:
        """The direction whose turn it is if it has a runnable task, else the other one."""
        for kind in (state, BACKWARD if state is FORWARD else FORWARD):
            task = ready.first(kind)
            if task is not None:
                return task, FORWARD if kind is BACKWARD else BACKWARD
        return None


@dataclass(frozen=True)
class GPipe(FixedOrder):
    """All forwards, then all backwards, both in microbatch order (Huang et al., arXiv:1811.06965)."""

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """F0, F1, ..., B0, B1, ..."""
        _require_one_chunk("GPipe", placement)
        return [Task(kind, 0, j) for kind in (FORWARD, BACKWARD) for j in range(microbatches)]


@dataclass(frozen=True)
class OneFOneB(FixedOrder):
    """Warm up with as many forwards as stages follow, then one forward, one backward (arXiv:1806.03377)."""

    def order(self, stage: int, placement: Placement, microbatches: int) -> Sequence[Task]:
        """Holds at most `stages - stage` microbatches at once."""
        _require_one_chunk("1F1B", placement)
        warmup = min(microbatches, placement.stages - stage - 1)
        steady = microbatches - warmup
        order = [Task(FORWARD, 0, j) for j in range(warmup)]
        for j in range(steady):
            order += [Task(FORWARD, 0, warmup + j), Task(BACKWARD, 0, j)]
        return order + [Task(BACKWARD, 0, j) for j in range(steady, microbatches)]


def _require_one_chunk(name: str, placement: Placement) -> None:
    if placement.chunks != 1:
        raise ValueError(f"{name} is defined for one chunk a stage, got {placement.chunks}")


_NAMED: dict[str, Schedule] = {"bf": BF(), "1f1b": OneFOneB(), "gpipe": GPipe()}


def by_name(name: str) -> Schedule:
    """A schedule by its name on command lines and in configs: bf, 1f1b, gpipe.

    Raises:
        ValueError: no such schedule.
    """
    if name not in _NAMED:
        known = ", ".join(sorted(_NAMED))
        raise ValueError(f"schedule={name!r}: no such schedule or hint; choose one of {known}")
    return _NAMED[name]
