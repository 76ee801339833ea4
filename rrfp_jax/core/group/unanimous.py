"""A tensor-parallel group that votes on each task (paper, section 4.2); `group.py` has the theory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from rrfp_jax.core.events import ROOM, Arrived, Event, Instruction, Room
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import Task


class Proposal(NamedTuple):
    """From every rank to all others: it would run `task`, or nothing.

    Attributes:
        round: 0 and 1 in turns, which is enough to tell rounds apart: nobody is further than one ahead.
    """

    round: int
    rank: int
    task: Task | None

    def __str__(self) -> str:
        return f"rank {self.rank}'s proposal of {self.task or 'nothing'}"


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

    def handle(self, event: Event | Proposal) -> tuple[Instruction | Proposal, ...]:
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
            return self._close()
        if isinstance(event, Arrived):
            if self._pending:
                self._later.append(event)
                return ()
            self._in_vain = False
            return self.scheduler.handle(event)
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

    def _propose(self) -> tuple[Instruction | Proposal, ...]:
        proposals, choice = self._proposals[self._round], self.scheduler.choice()
        if self._pending or (not proposals and (choice is None or self._in_vain)):
            return ()  # nobody needs to hear that there is nothing to run, or the same again
        proposals[self.rank] = choice
        return Proposal(self._round, self.rank, choice), *self._close()

    def _close(self) -> tuple[Instruction, ...]:
        proposals = self._proposals[self._round]
        if len(proposals) < self.ranks:
            return ()
        named = set(proposals.values())
        instructions = self.scheduler.handle(ROOM) if len(named) == 1 and None not in named else ()
        proposals.clear()
        self._round = 1 - self._round
        self._in_vain = not instructions and not self._later
        for event in self._later:
            self.scheduler.handle(event)
        self._later.clear()
        return instructions
