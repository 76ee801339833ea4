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
        late: tasks to take only if the hint chooses none of the others. A fixed order has no choice, and does
            not look at them.
    """

    late: Collection[Task] = ()

    def __str__(self) -> str:
        return "room"


class Chosen(NamedTuple):
    """The device can take one more task now, and the stage's group runs `task` next (core/group.py).

    Not kept: told while the task is waiting, it does nothing and must be told again. Illegal under a fixed
    order.
    """

    task: Task

    def __str__(self) -> str:
        return f"chosen {self.task}"


class Dispatch(NamedTuple):
    """The one instruction: run the program of `task`, and add gradients to its chunk's gradient sums.

    The task's output, if another stage needs it, is offered at once.

    Attributes:
        additions: the microbatches whose gradients are added, in this order: that of this task, which its
            program adds, then those parked before it.
        ready: the tasks of this stage that the dispatch makes ready. They follow from the task and the stage,
            and are left out of comparisons.
    """

    task: Task
    additions: tuple[int, ...] = ()
    ready: tuple[Task, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dispatch) and self[:2] == other[:2]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:2])

    @property
    def in_turn(self) -> bool:
        """Whether the task's own gradient is the first of the additions; else it is parked, if it has one."""
        return bool(self.additions)


Event: TypeAlias = Arrived | Room | Chosen

ROOM = Room()


class ScheduleError(RuntimeError):
    """A hint broke its contract."""


class IllegalEvent(RuntimeError):
    """An event that the rules exclude. The scheduler's state is unchanged."""

    def __init__(self, stage: int, event: object, expected: str, history: str) -> None:
        super().__init__(f"stage {stage}: '{event}' is illegal: expected {expected}; {history}")
