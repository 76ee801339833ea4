"""A tensor-parallel group that votes on each task (paper, section 4.2); `group.py` has the theory."""

from __future__ import annotations

from collections.abc import Hashable

from rrfp_jax.core.events import ROOM, Arrived, Dispatch, Event, Room
from rrfp_jax.core.group.messages import NOTHING, Answer, GroupMessage, Proposal
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import Task
from rrfp_jax.core.transitions import Refusal


class Unanimous:
    """A rank of a group that votes. `handle` is the only method that changes it."""

    def __init__(self, scheduler: StageScheduler, rank: int, ranks: int) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self.ranks = ranks
        self._round = 0
        self._proposals: list[dict[int, Task | None]] = [{}, {}]  # by round, then by rank
        self._later: list[Arrived] = []  # came after this rank's proposal
        self._in_vain = False  # the latest round brought nothing, and nothing has arrived since

    def handle(self, event: Event | GroupMessage) -> Answer:
        """Take in `Arrived`, `Room` or a `Proposal`. Room is kept from a rank's proposal to its round's end.

        Raises:
            IllegalEvent, ScheduleError: see `StageScheduler.handle`.
        """
        if isinstance(event, Room):
            return self._propose()
        if isinstance(event, Proposal):
            proposals = self._proposals[event.round]
            if event.rank in proposals or event.rank == self.rank or not 0 <= event.rank < self.ranks:
                raise self.scheduler.illegal(event, "one proposal a round from each other rank")
            proposals[event.rank] = event.task
            return Answer(self._close())
        if isinstance(event, Arrived):
            if self._pending:
                self._defer(event)
            else:
                self.scheduler.handle(event)
                self._in_vain = False
            return NOTHING
        raise self.scheduler.illegal(event, "arrivals, room and proposals")

    def awaited(self) -> str:
        """See `StageScheduler.awaited`."""
        if not self._pending:
            return self.scheduler.awaited()
        silent = sorted(set(range(self.ranks)) - set(self._proposals[self._round]))
        return f"the proposals of members {', '.join(map(str, silent))}"

    def key(self) -> Hashable:
        """See `StageScheduler.key`."""
        proposals = tuple(frozenset(of_round.items()) for of_round in self._proposals)
        return self.scheduler.key(), self._round, proposals, frozenset(self._later), self._in_vain

    @property
    def _pending(self) -> bool:
        return self.rank in self._proposals[self._round]

    def _defer(self, event: Arrived) -> None:
        """Keep an arrival for the end of the round, when what this rank proposes may have been dispatched."""
        if event in self._later:
            raise self.scheduler.illegal(event, Refusal.ONCE.value)
        self.scheduler.require_possible(event, self._proposals[self._round][self.rank])
        self._later.append(event)

    def _propose(self) -> Answer:
        proposals, choice = self._proposals[self._round], self.scheduler.choice()
        if self._pending or (not proposals and (choice is None or self._in_vain)):
            return NOTHING  # nobody needs to hear that there is nothing to run, or the same again
        proposals[self.rank] = choice
        proposal = Proposal(self._round, self.rank, choice)
        return Answer(self._close(), proposal)

    def _close(self) -> Dispatch | None:
        """End the round if all proposals are there."""
        proposals = self._proposals[self._round]
        if len(proposals) < self.ranks:
            return None
        named = set(proposals.values())
        dispatch = self.scheduler.handle(ROOM) if len(named) == 1 and None not in named else None
        proposals.clear()
        self._round = 1 - self._round
        self._in_vain = dispatch is None and not self._later
        for event in self._later:
            self.scheduler.handle(event)
        self._later.clear()
        return dispatch
