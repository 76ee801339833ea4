"""What a stage waits for when it dispatches nothing: a value, with its only words in `str`."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from rrfp_jax.core.tasks import Task

TASKS_NAMED = 3


class WaitCause(StrEnum):
    """Why a stage dispatches nothing. New ones go to the end, as packed records number them."""

    DONE = "done"  # all tasks are dispatched
    RUNNABLE = "runnable"  # nothing: a task can run, and nobody has asked
    ORDER = "order"  # the next task of a fixed order
    ROOM = "room"  # a limit on what is in flight
    TURN = "turn"  # gradients of lower microbatches, as there is no place for another one out of turn
    INPUT = "input"  # inputs from other virtual stages
    LEADER = "leader"  # the decision of the group's leader
    CHOSEN = "chosen"  # the input of the task that the leader chose
    PROPOSALS = "proposals"  # the votes of members of the group


class Wait(NamedTuple):
    """What a stage waits for.

    Attributes:
        tasks: that it could run otherwise.
        members: of the group, that have not voted.
        in_flight: microbatches, or chunks of microbatches if `by_chunk`.
        group: the ranks that agree on the stage's order; empty for a stage of one rank.
    """

    cause: WaitCause
    tasks: tuple[Task, ...] = ()
    members: tuple[int, ...] = ()
    in_flight: int = 0
    by_chunk: bool = False
    group: tuple[int, ...] = ()

    def __str__(self) -> str:
        first = self.tasks[0] if self.tasks else None
        named = ", ".join(map(str, self.tasks[:TASKS_NAMED]))
        more = f" and {len(self.tasks) - TASKS_NAMED} more" if len(self.tasks) > TASKS_NAMED else ""
        chunks = "chunks of " if self.by_chunk else ""
        words = {
            WaitCause.DONE: "nothing: all dispatched",
            WaitCause.RUNNABLE: f"nothing: {first} can run",
            WaitCause.ORDER: f"{first}, next in the fixed order",
            WaitCause.ROOM: f"room for {first} ({self.in_flight} {chunks}microbatches in flight)",
            WaitCause.TURN: f"the gradients before that of {first}, which has no place",
            WaitCause.INPUT: f"the input of {named}{more}",
            WaitCause.LEADER: "the leader's decision",
            WaitCause.CHOSEN: f"the input of {first}, which the leader chose",
            WaitCause.PROPOSALS: f"the proposals of members {', '.join(map(str, self.members))}",
        }[self.cause]
        return f"{words} (its group is ranks {', '.join(map(str, self.group))})" if self.group else words
