"""How the ranks of a tensor-parallel group come to run the same tasks in the same order.

The ranks of a group share a stage, and take part in the collectives inside each program. So all must dispatch
the same sequence, although inputs reach them at different moments. Each rank has a `StageScheduler` of the
whole stage. The machine of a protocol stands between it and the driver: it is told events, among them
messages of other ranks, and its `Answer` has the message to send and the task to dispatch. Messages may
overtake one another. Stages that follow a fixed order need none of this.

A rank may get the gradient of a microbatch before it has run its forward, if others have: where stages differ
in width, one rank sends an activation for several. Such a gradient is taken in after that forward.

*Leader*. Rank 0 chooses by the scheduler's rules, and publishes each `Decision` before it runs the task. The
others run the decisions in order, each as soon as they have their own input of it. They ask neither hint nor
admission: what is held follows from what was dispatched, which is equal on all. They report what arrives.
Rank 0 takes a task whose input has not reached all ranks only if the hint chooses none of the others, and
does not wait for that input: the rank that lacks it waits for that one transfer, and the others inside the
program. Nobody can wait in a circle: whatever a decision needs was decided before it, on whichever stage.

*Unanimous* (the paper, section 4.2 and appendix D). A rank that has room proposes the task that it would run,
or none. A round ends when the proposals of all are there. If all name the same task, all run it; if not,
nobody does, and no hint's state advances. A rank that has got something new since, or that hears a new
proposal, proposes again when it is next given room. What arrives after a rank's own proposal counts from the
next round on, so that the task proposed is the task run. Once everything has arrived everywhere, all propose
the same, since their schedulers have equal states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from rrfp_jax.core.events import ROOM, Arrived, Chosen, Dispatch, Event, Room, Wait, WaitCause
from rrfp_jax.core.progress import ArrivalError
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import Input, Task


class ArrivalReport(NamedTuple):
    """To rank 0: this input has arrived at `rank`."""

    rank: int
    input: Input

    def __str__(self) -> str:
        return f"rank {self.rank}'s report of {self.input}"


class Decision(NamedTuple):
    """From rank 0 to all others: the group's dispatch number `position`, from 0, is that of `task`."""

    position: int
    task: Task

    def __str__(self) -> str:
        return f"decision {self.position}, {self.task}"


class Proposal(NamedTuple):
    """From every rank to all others: it would run `task`, or nothing. Rounds count 0 and 1 in turns."""

    round: int
    rank: int
    task: Task | None

    def __str__(self) -> str:
        return f"rank {self.rank}'s proposal of {self.task or 'nothing'}"


GroupMessage: TypeAlias = ArrivalReport | Decision | Proposal


class Answer(NamedTuple):
    """What follows from an event: a message to send first, and a task to dispatch, if there is one."""

    dispatch: Dispatch | None = None
    message: GroupMessage | None = None


NOTHING = Answer()


class Member:
    """A rank's machine. `handle` is the only method that changes it."""

    def __init__(self, scheduler: StageScheduler) -> None:
        self.scheduler = scheduler
        self._early: list[Arrived] = []  # gradients, before their forwards

    def handle(self, event: Event | GroupMessage) -> Answer:
        """Take in an event, or a message from another rank of the group; raises as a scheduler does."""
        raise NotImplementedError

    def _take(self, event: Arrived) -> None:
        """Take an arrival in, or keep it."""
        if event in self._early:
            raise self.scheduler.illegal(event, ArrivalError.ONCE.value)
        if self.scheduler.refusal(event.input) == ArrivalError.EARLY.value:
            self._early.append(event)
        else:
            self.scheduler.handle(event)

    def _run(self, event: Room | Chosen) -> Dispatch | None:
        """Have the scheduler dispatch, and take in what was kept for that."""
        dispatch = self.scheduler.handle(event)
        if dispatch is not None and self._early:
            kept, self._early = self._early, []
            for early in kept:
                self._take(early)
        return dispatch

    def awaited(self, named: bool = True) -> Wait:
        return self.scheduler.awaited(named)


class Alone(Member):
    """A rank that has nothing to agree on: the only one of its stage, or one with a fixed order."""

    def __init__(self, scheduler: StageScheduler, ranks: int = 1) -> None:
        super().__init__(scheduler)
        self._ranks = ranks

    def handle(self, event: Event | GroupMessage) -> Answer:
        if isinstance(event, GroupMessage):
            raise self.scheduler.illegal(event, "arrivals and room, as there is nothing to agree on")
        if self._ranks == 1:
            return Answer(self.scheduler.handle(event))
        if isinstance(event, Arrived):
            self._take(event)
            return NOTHING
        return Answer(self._run(event))


class Leader(Member):
    """Rank 0 of a group that it leads. It takes in arrivals, room, and reports of arrivals elsewhere."""

    def __init__(self, scheduler: StageScheduler, ranks: int) -> None:
        super().__init__(scheduler)
        self.ranks = ranks
        self._position = 0  # of the next decision
        self._lacking: dict[Input, int] = {}  # the ranks that an input is yet to reach, this one too

    def handle(self, event: Event | GroupMessage) -> Answer:
        if isinstance(event, Room):
            return self._decide()
        if isinstance(event, ArrivalReport):
            if not 0 < event.rank < self.ranks:
                raise self.scheduler.illegal(event, f"a report from ranks 1 to {self.ranks - 1}")
        elif isinstance(event, Arrived):
            self.scheduler.handle(event)
        else:
            raise self.scheduler.illegal(event, "arrivals, room and reports, on the leader")
        if lacking := self._lacking.pop(event.input, self.ranks) - 1:
            self._lacking[event.input] = lacking
        return NOTHING

    def _decide(self) -> Answer:
        late = frozenset(self.scheduler.task_for(*lacking) for lacking in self._lacking)
        if (dispatch := self.scheduler.handle(Room(late))) is None:
            return NOTHING
        decision = Decision(self._position, dispatch.task)
        self._position += 1
        return Answer(dispatch, decision)


class Follower(Member):
    """Any other rank of a group with a leader. It takes in arrivals, room, and decisions."""

    def __init__(self, scheduler: StageScheduler, rank: int) -> None:
        super().__init__(scheduler)
        self.rank = rank
        self._position = 0  # of the next dispatch
        self._decided: dict[int, Task] = {}

    def handle(self, event: Event | GroupMessage) -> Answer:
        if isinstance(event, Room):
            return self._obey()
        if isinstance(event, Decision):
            if event.position < self._position or event.position in self._decided:
                raise self.scheduler.illegal(event, "each position once")
            self._decided[event.position] = event.task
            return NOTHING
        if isinstance(event, Arrived):
            self._take(event)
            return Answer(message=ArrivalReport(self.rank, event.input))
        raise self.scheduler.illegal(event, "arrivals, room and decisions, on a follower")

    def awaited(self, named: bool = True) -> Wait:
        if self.scheduler.finished:
            return super().awaited()
        task = self._decided.get(self._position)
        return Wait(WaitCause.LEADER) if task is None else Wait(WaitCause.CHOSEN, (task,))

    def _obey(self) -> Answer:
        task = self._decided.get(self._position)
        dispatch = None if task is None else self._run(Chosen(task))
        if dispatch is None:
            return NOTHING
        del self._decided[self._position]
        self._position += 1
        return Answer(dispatch)


class Unanimous(Member):
    """A rank of a group that votes. It takes in arrivals, proposals, and room, which it keeps from its own
    proposal to the end of the round."""

    def __init__(self, scheduler: StageScheduler, rank: int, ranks: int) -> None:
        super().__init__(scheduler)
        self.rank, self.ranks = rank, ranks
        self._round = 0
        self._proposals: list[dict[int, Task | None]] = [{}, {}]  # by round, then by rank
        self._later: list[Arrived] = []  # came after this rank's proposal
        self._in_vain = False  # the latest round brought nothing, and nothing has arrived since

    def handle(self, event: Event | GroupMessage) -> Answer:
        if isinstance(event, Room):
            return self._propose()
        if isinstance(event, Proposal):
            proposals = self._proposals[event.round]
            if event.rank in proposals or event.rank == self.rank or not 0 <= event.rank < self.ranks:
                raise self.scheduler.illegal(event, "one proposal a round from each other rank")
            proposals[event.rank] = event.task
            return Answer(self._close())
        if isinstance(event, Arrived):
            if self.rank in self._proposals[self._round]:
                self._defer(event)
            else:
                self.scheduler.handle(event)
                self._in_vain = False
            return NOTHING
        raise self.scheduler.illegal(event, "arrivals, room and proposals")

    def awaited(self, named: bool = True) -> Wait:
        if self.rank not in (proposals := self._proposals[self._round]):
            return super().awaited(named)
        silent = sorted(set(range(self.ranks)) - set(proposals))
        return Wait(WaitCause.PROPOSALS, members=tuple(silent))

    def _defer(self, event: Arrived) -> None:
        """Keep an arrival for the end of the round, when what this rank proposes may have been dispatched."""
        if event in self._later:
            raise self.scheduler.illegal(event, ArrivalError.ONCE.value)
        expected = self.scheduler.refusal(event.input, self._proposals[self._round][self.rank])
        if expected is not None:
            raise self.scheduler.illegal(event, expected)
        self._later.append(event)

    def _propose(self) -> Answer:
        proposals, choice = self._proposals[self._round], self.scheduler.choice()
        if self.rank in proposals or (not proposals and (choice is None or self._in_vain)):
            return NOTHING  # nobody needs to hear that there is nothing to run, or the same again
        proposals[self.rank] = choice
        return Answer(message=Proposal(self._round, self.rank, choice), dispatch=self._close())

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


GroupProtocol: TypeAlias = Literal["leader", "unanimous"]
"""By what rules the ranks of a group come to one order."""


def member(scheduler: StageScheduler, rank: int, ranks: int, protocol: GroupProtocol) -> Member:
    """The machine of one rank of a group."""
    if ranks == 1 or scheduler.rules.hint is None:
        return Alone(scheduler, ranks)
    if protocol == "unanimous":
        return Unanimous(scheduler, rank, ranks)
    return Follower(scheduler, rank) if rank else Leader(scheduler, ranks)


def partners(rank: int, ranks: int, protocol: GroupProtocol) -> Sequence[int]:
    """The ranks of a group of so many that hear all messages of one of them, and that it hears itself."""
    if protocol == "leader" and rank:
        return (0,)
    return [other for other in range(ranks) if other != rank]
