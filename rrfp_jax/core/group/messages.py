"""What the ranks of a group tell each other, and what their machines answer."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from rrfp_jax.core.events import Dispatch
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
    """From every rank to all others: it would run `task`, or nothing.

    Attributes:
        round: 0 and 1 in turns, which is enough to tell rounds apart: nobody is further than one ahead.
    """

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
