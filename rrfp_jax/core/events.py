"""What a stage scheduler is told, what it answers, and the error for what it must never be told."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.tasks import Task


class Arrived(NamedTuple):
    """The input of `task` from another virtual stage is here, complete and without error."""

    task: Task

    def __str__(self) -> str:
        return f"arrived {self.task}"


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
    """Run the program of `task`; its output, if another stage needs it, is offered at once."""

    task: Task


class Accumulate(NamedTuple):
    """Add this microbatch's gradient of `chunk`, just computed or parked before, to the accumulator."""

    chunk: int
    microbatch: int


Event: TypeAlias = Arrived | Room | Chosen
Instruction: TypeAlias = Dispatch | Accumulate

ROOM = Room()


class ScheduleError(RuntimeError):
    """A hint broke its contract."""


class IllegalEvent(RuntimeError):
    """An event that the rules exclude. The scheduler's state is unchanged."""

    def __init__(self, stage: int, event: object, expected: str, history: Iterable[object]) -> None:
        recent = ", ".join(str(item) for item in history) or "nothing yet"
        super().__init__(f"stage {stage}: '{event}' is illegal: expected {expected}; recently: {recent}")
