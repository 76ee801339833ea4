"""A tensor-parallel group in which rank 0 decides; core/group/group.py has the theory of operation."""

from __future__ import annotations

from collections.abc import Hashable

from rrfp_jax.core.events import Arrived, Chosen, Event, Room
from rrfp_jax.core.group.messages import NOTHING, Answer, ArrivalReport, Decision, GroupMessage
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import Input, Task


class Leader:
    """Rank 0 of a group that it leads. `handle` is the only method that changes it."""

    def __init__(self, scheduler: StageScheduler, ranks: int) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self._position = 0  # of the next decision
        self._lacking: dict[Input, int] = {}  # the ranks that an input is yet to reach, this one too

    def handle(self, event: Event | GroupMessage) -> Answer:
        """Take in `Arrived`, `Room` or a `ArrivalReport`.

        Raises:
            IllegalEvent, ScheduleError: see `StageScheduler.handle`.
        """
        if isinstance(event, Room):
            return self._decide()
        if isinstance(event, ArrivalReport):
            if not 0 < event.rank < self.ranks:
                raise self.scheduler.illegal(event, f"a report from ranks 1 to {self.ranks - 1}")
            self._count(event.input)
            return NOTHING
        if isinstance(event, Arrived):
            self.scheduler.handle(event)
            self._count(event.input)
            return NOTHING
        raise self.scheduler.illegal(event, "arrivals, room and reports, on the leader")

    def awaited(self) -> str:
        """See `StageScheduler.awaited`."""
        return self.scheduler.awaited()

    def key(self) -> Hashable:
        """See `StageScheduler.key`; the position follows from what was dispatched."""
        return self.scheduler.key(), frozenset(self._lacking.items())

    def _count(self, arrived: Input) -> None:
        lacking = self._lacking.pop(arrived, self.ranks) - 1
        if lacking:
            self._lacking[arrived] = lacking

    def _decide(self) -> Answer:
        late = frozenset(self.scheduler.task_for(*lacking) for lacking in self._lacking)
        dispatch = self.scheduler.handle(Room(late))
        if dispatch is None:
            return NOTHING
        decision = Decision(self._position, dispatch.task)
        self._position += 1
        return Answer(dispatch, decision)


class Follower:
    """Any other rank of a group with a leader. `handle` is the only method that changes it."""

    def __init__(self, scheduler: StageScheduler, rank: int) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self._position = 0  # of the next dispatch
        self._decided: dict[int, Task] = {}

    def handle(self, event: Event | GroupMessage) -> Answer:
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
            return NOTHING
        if isinstance(event, Arrived):
            self.scheduler.handle(event)
            return Answer(message=ArrivalReport(self.rank, event.input))
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

    def _obey(self) -> Answer:
        task = self._decided.get(self._position)
        dispatch = None if task is None else self.scheduler.handle(Chosen(task))
        if dispatch is None:
            return NOTHING
        del self._decided[self._position]
        self._position += 1
        return Answer(dispatch)
