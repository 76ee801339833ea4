"""How the ranks of a tensor-parallel group come to run the same tasks in the same order.

Theory of operation. The ranks of a group share a stage. Each holds a part of every tensor, gets its part of
every input by itself, and takes part in the collectives inside each program. So all must dispatch the same
sequence, although inputs reach them at different moments. Each rank has a `StageScheduler` of the whole
stage. The machine of a protocol stands between it and the driver. It is told events, among them the messages
that it has received, and its `Answer` has the message to send and the task to dispatch. Messages may overtake
one another. Stages that follow a fixed order need none of this.

*Leader*. Rank 0 chooses when its device has room, by the scheduler's rules. It publishes each `Decision`
before it runs the task. The other ranks run the decisions in order, each one as soon as they have their own
input of it. They ask neither hint nor admission: what is held follows from what was dispatched, which is
equal on all. They report what arrives. Among the runnable tasks, rank 0 takes one whose input has not reached
all ranks only if the hint chooses none of the others. It does not wait for that input. The rank that lacks it
waits for that one transfer, and the others wait for the rank inside the program; to wait before the program
would idle all of them. Nobody can wait in a circle: whatever a decision needs was decided before it, on
whichever stage, so every rank can follow the order in which the leaders decided to the end. A driver hides
the time that a decision takes to arrive by giving rank 0 room early.

*Unanimous* (the paper, section 4.2 and appendix D). A rank that has room proposes the task that it would run,
or none. A round ends when the proposals of all are there. If all name the same task, all run it. If not,
nobody does, and no hint's state advances. A rank that has got something new since, or that hears a new
proposal, proposes again when it is next given room. What arrives after a rank's own proposal counts from the
next round on, so that the task proposed is the task run. Ranks can differ only while something has still to
arrive somewhere. Once everything has arrived everywhere, all propose the same, since their schedulers have
equal states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

from rrfp_jax.core.events import Event
from rrfp_jax.core.group.leader import Follower, Leader
from rrfp_jax.core.group.messages import NOTHING, Answer, ArrivalReport, GroupMessage, Proposal
from rrfp_jax.core.group.unanimous import Unanimous
from rrfp_jax.core.scheduler import StageScheduler

GroupProtocol: TypeAlias = Literal["leader", "unanimous"]
"""By what rules the ranks of a group come to one order."""


class Alone:
    """A rank that has nothing to agree on: the only one of its stage, or one with a fixed order."""

    def __init__(self, scheduler: StageScheduler) -> None:
        self.scheduler = scheduler

    def handle(self, event: Event | GroupMessage) -> Answer:
        """See `StageScheduler.handle`."""
        if isinstance(event, GroupMessage):
            raise self.scheduler.illegal(event, "arrivals and room, as there is nothing to agree on")
        dispatch = self.scheduler.handle(event)
        return NOTHING if dispatch is None else Answer(dispatch)

    def awaited(self) -> str:
        """See `StageScheduler.awaited`."""
        return self.scheduler.awaited()

    def key(self) -> Hashable:
        """See `StageScheduler.key`."""
        return self.scheduler.key()


Member: TypeAlias = Alone | Leader | Follower | Unanimous
"""A rank's machine: `handle(event) -> Answer` is the only method that changes it."""


def member(scheduler: StageScheduler, rank: int, ranks: int, protocol: GroupProtocol) -> Member:
    """The machine of one rank of a group.

    Raises:
        ValueError: an unknown protocol, or a rank that is not in the group.
    """
    if protocol not in ("leader", "unanimous"):
        raise ValueError(f"protocol={protocol!r}: choose 'leader' or 'unanimous'")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank}: the group has ranks 0 to {ranks - 1}")
    if ranks == 1 or scheduler.rules.hint is None:
        return Alone(scheduler)
    if protocol == "unanimous":
        return Unanimous(scheduler, rank, ranks)
    return Follower(scheduler, rank) if rank else Leader(scheduler, ranks)


def recipients(message: GroupMessage, ranks: int) -> Sequence[int]:
    """The ranks of a group of so many that a message is for."""
    if isinstance(message, ArrivalReport):
        return (0,)
    return partners(message.rank if isinstance(message, Proposal) else 0, ranks, "unanimous")


def partners(rank: int, ranks: int, protocol: GroupProtocol) -> Sequence[int]:
    """The ranks of a group of so many that hear all messages of one of them, and that it hears itself."""
    if protocol == "leader" and rank:
        return (0,)
    return [other for other in range(ranks) if other != rank]
