"""A tensor-parallel group in which rank 0 decides; core/group/group.py has the theory of operation."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from rrfp_jax.core.events import Arrived, Chosen, Event, Instruction, Room
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import Task


class Report(NamedTuple):
    """To rank 0: the input of `task` has arrived at `rank`."""

    rank: int
    task: Task

    def __str__(self) -> str:
        return f"rank {self.rank}'s report of {self.task}"


class Decision(NamedTuple):
    """From rank 0 to all others: the group's dispatch number `position`, from 0, is that of `task`."""

    position: int
    task: Task

    def __str__(self) -> str:
        return f"decision {self.position}, {self.task}"


class Leader:
    """Rank 0 of a group that it leads. `handle` is the only method that changes it."""

    def __init__(self, scheduler: StageScheduler, ranks: int) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self._position = 0  # of the next decision
        self._lacking: dict[Task, int] = {}  # the ranks that an input is yet to reach, this one too

    def handle(self, event: Event | Report) -> tuple[Instruction | Decision, ...]:
        """Take in `Arrived`, `Room` or a `Report`.

        Raises:
            IllegalEvent, ScheduleError: see `StageScheduler.handle`.
        """
        if isinstance(event, Room):
            return self._decide()
        if isinstance(event, Report):
            if not 0 < event.rank < self.ranks:
                raise self.scheduler.illegal(event, f"a report from ranks 1 to {self.ranks - 1}")
            self._count(event.task)
            return ()
        if isinstance(event, Arrived):
            self.scheduler.handle(event)
            self._count(event.task)
            return ()
        raise self.scheduler.illegal(event, "arrivals, room and reports, on the leader")

    def awaited(self) -> str:
        """See `StageScheduler.awaited`."""
        return self.scheduler.awaited()

    def key(self) -> Hashable:
        """See `StageScheduler.key`; the position follows from what was dispatched."""
        return self.scheduler.key(), frozenset(self._lacking.items())

    def _count(self, task: Task) -> None:
        lacking = self._lacking.pop(task, self.ranks) - 1
        if lacking:
            self._lacking[task] = lacking

    def _decide(self) -> tuple[Instruction | Decision, ...]:
        late = frozenset(self.scheduler.named(task) for task in self._lacking)
        instructions = self.scheduler.handle(Room(late))
        if not instructions:
            return ()
        decision = Decision(self._position, instructions[0].task)  # type: ignore[union-attr]
        self._position += 1
        return decision, *instructions


class Follower:
    """Any other rank of a group with a leader. `handle` is the only method that changes it."""

    def __init__(self, scheduler: StageScheduler, rank: int) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self._position = 0  # of the next dispatch
        self._decided: dict[int, Task] = {}

    def handle(self, event: Event | Decision) -> tuple[Instruction | Report, ...]:
        """Take in `Arrived`, `Room` or a `Decision`.

        Raises:
            IllegalEvent: see `StageScheduler.handle`.
        """
        if isinstance(event, Room):
            return self._obey()
        if isinstance(event, Decision):
            if event.position < self._position or event.position in self._decided:
                raise self.scheduler.illegal(event, "each position once")
            self._decided[event.position] = event.task
            return ()
        if isinstance(event, Arrived):
            self.scheduler.handle(event)
            return (Report(self.rank, event.task),)
        raise self.scheduler.illegal(event, "arrivals, room and decisions, on a follower")

    def awaited(self) -> str:
        """See `StageScheduler.awaited`."""
        task = self._decided.get(self._position)
        if task is None:
            return "the leader's decision" if not self.scheduler.finished else self.scheduler.awaited()
        return f"the input of {task}, which the leader chose"

    def key(self) -> Hashable:
        """See `StageScheduler.key`; the position follows from what was dispatched."""
        return self.scheduler.key(), frozenset(self._decided.items())

    def _obey(self) -> tuple[Instruction, ...]:
        task = self._decided.get(self._position)
        instructions = () if task is None else self.scheduler.handle(Chosen(task))
        if instructions:
            del self._decided[self._position]
            self._position += 1
        return instructions
