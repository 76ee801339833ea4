"""What a stage scheduler is told, and what it answers: a dispatch, what it waits for, or an error."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.tasks import Input, Task


class Arrived(NamedTuple):
    """An input from another virtual stage is here, complete and without error."""

    input: Input

    def __str__(self) -> str:
        return f"arrived {self.input}"


class Room(NamedTuple):
    """The device can take one more task now; of `late` ones only if the hint chooses none of the others.

    Inputs that are `foreseen` are on their way, and expected in time: their tasks can be chosen, too. That of
    the chosen one has then arrived, and no `Arrived` follows; the others have not.
    """

    late: Collection[Task] = ()
    foreseen: Collection[Input] = ()

    def __str__(self) -> str:
        return f"room, foreseeing {', '.join(map(str, self.foreseen))}" if self.foreseen else "room"


class Chosen(NamedTuple):
    """The device can take one more task now, and the stage's group runs `task` next; no fixed order does."""

    task: Task

    def __str__(self) -> str:
        return f"chosen {self.task}"


class Dispatch(NamedTuple):
    """The one instruction: run the program of `task`, and add gradients to its chunk's gradient sums.

    `additions` are the microbatches whose gradients are added, in this order: that of this task, which its
    program adds, then those parked before it; none if it is parked itself. `ready` are the tasks of this
    stage that the dispatch makes ready.
    """

    task: Task
    additions: tuple[int, ...] = ()
    ready: tuple[Task, ...] = ()


Event: TypeAlias = Arrived | Room | Chosen

ROOM = Room()


class ScheduleError(RuntimeError):
    """A hint broke its contract."""


class IllegalEvent(RuntimeError):
    """An event that the rules exclude. The scheduler's state is unchanged."""

    def __init__(self, stage: int, event: object, expected: str, history: str) -> None:
        super().__init__(f"stage {stage}: '{event}' is illegal: expected {expected}; {history}")


TASKS_NAMED = 3
"""How many tasks a stage's wait names; of more it says how many."""


class WaitCause(StrEnum):
    """Why a stage dispatches nothing; `Wait` has the words, `HELD` (trace/idleness.py) the cause of idleness.

    New ones go to the end, as packed records number them: at most 15.
    """

    DONE = "done"  # all tasks are dispatched
    RUNNABLE = "runnable"  # nothing: a task can run, and nobody has asked
    ORDER = "order"  # the next task of a fixed order
    ROOM = "room"  # a limit on what is in flight
    TURN = "turn"  # gradients of lower microbatches, as there is no place for another one out of turn
    INPUT = "input"  # inputs from other virtual stages
    LEADER = "leader"  # the decision of the group's leader
    CHOSEN = "chosen"  # the input of the task that the leader chose
    PROPOSALS = "proposals"  # the votes of members of the group
    RESERVED = "reserved"  # room that a ranking keeps for what its order needs, though a task could run


class Wait(NamedTuple):
    """What a stage waits for: tasks that it could run otherwise, or members of its group that have not voted.

    `in_flight` counts microbatches, or chunks of them if `by_chunk`. `group` are the ranks that agree on the
    stage's order, if there are several.
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
            WaitCause.RESERVED: f"the room that its order keeps: {first} could run",
            WaitCause.PROPOSALS: f"the proposals of members {', '.join(map(str, self.members))}",
        }[self.cause]
        return f"{words} (its group is ranks {', '.join(map(str, self.group))})" if self.group else words
