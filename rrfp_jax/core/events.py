"""What a stage scheduler is told, what it answers, and the error for what it must never be told."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.tasks import Input, Task


class Arrived(NamedTuple):
    """An input from another virtual stage is here, complete and without error."""

    input: Input

    def __str__(self) -> str:
        return f"arrived {self.input}"


class Room(NamedTuple):
    """The device can take one more task now. Not kept: unused room is offered again by the driver.

    Attributes:
        late: tasks to leave for when nothing else can run.
    """

    late: Collection[Task] = ()

    def __str__(self) -> str:
        return "room"


class Chosen(NamedTuple):
    """The device can take one more task now, and the stage's group runs `task` next (core/group/group.py)."""

    task: Task

    def __str__(self) -> str:
        return f"chosen {self.task}"


class Dispatch(NamedTuple):
    """The one instruction: run the program of `task`, then add gradients of its chunk to the accumulator.

    The task's output, if another stage needs it, is offered at once.

    Attributes:
        additions: the microbatches whose gradients are added, in this order: computed by this task, or parked
            before it.
    """

    task: Task
    additions: tuple[int, ...] = ()


Event: TypeAlias = Arrived | Room | Chosen

ROOM = Room()


class ScheduleError(RuntimeError):
    """A hint broke its contract."""


class IllegalEvent(RuntimeError):
    """An event that the rules exclude. The scheduler's state is unchanged."""

    def __init__(self, stage: int, event: object, expected: str, history: str) -> None:
        super().__init__(f"stage {stage}: '{event}' is illegal: expected {expected}; {history}")
