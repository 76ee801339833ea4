"""The core's machines as tables: what each does with an event in a state is worked out once and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from rrfp_jax.core.events import ROOM, Arrived, Room
from rrfp_jax.core.group import GroupMessage, GroupProtocol, Member, member
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Direction, Task
from tests.verification.exploration.witness import Seen, Witness, require


class StateCheck(Protocol):
    """A check of states by what the rank of each stage has seen."""

    def check(self, seen: Sequence[Seen]) -> None:
        """Raises `Broken` if a state must not be."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to explore."""

    rules: StepRules
    budgets: tuple[Budget, ...] | None = None
    ranks: int = 1
    protocol: GroupProtocol = "leader"
    collectives: bool = True
    any_choice: bool = False
    memory: StateCheck | None = None

    def budget(self, stage: int) -> Budget | None:
        """The budget of a stage."""
        return self.budgets[stage] if self.budgets else None


Maker: TypeAlias = Callable[[Case, int, int], Member]
"""Makes the machine of (case, stage, rank) at the beginning of the step."""


def real(case: Case, stage: int, rank: int, scheduler: type[StageScheduler] = StageScheduler) -> Member:
    """The core's own machine."""
    return member(scheduler(stage, case.rules, case.budget(stage)), rank, case.ranks, case.protocol)


class Step(NamedTuple):
    """What an event does to a rank: the row after it, the task dispatched, the message to the group."""

    event: object
    row: int
    task: Task | None
    message: GroupMessage | None

    @property
    def advances(self) -> bool:
        """Whether this brings the whole nearer to its end, and not only moves messages."""
        return self.task is not None or isinstance(self.event, Arrived)


class Table:
    """One rank's machine, with a witness. A row is a state of both; row 0 is the start."""

    def __init__(self, case: Case, stage: int, rank: int, make: Maker) -> None:
        self._any_choice = case.any_choice
        self._chooses = case.ranks == 1 or (case.protocol == "leader" and rank == 0)
        self._make: Callable[[], Any] = partial(make, case, stage, rank)
        self._witness = Witness(stage, case.rules, case.budget(stage))
        machine, seen = self._make(), self._witness.start()
        self._rows: dict[Hashable, int] = {(machine.key(), seen): 0}
        self._seen = [seen]
        self._ways: list[tuple[int, object]] = [(0, None)]  # the row before, and the event that led on
        self._unused: dict[int, Any] = {}  # machines that happen to be in a row's state
        self.complete = [self._witness.complete(seen)]

    def seen(self, row: int) -> Seen:
        """What has happened when a row is reached."""
        return self._seen[row]

    def rooms(self, row: int) -> list[Step]:
        """What room does: one step; none if nothing changes; for any choice, one for every task."""
        rooms = [ROOM]
        if self._any_choice:
            machine = self._unused[row] = self._machine(row)
            runnable = [task for way in Direction for task in machine.scheduler.view.runnable(way)]
            rooms = [Room(frozenset(runnable) - {task}) for task in runnable]
        steps = [step for step in (self.step(row, room) for room in rooms) if step.row != row]
        if self._chooses and not steps:
            self._witness.check_idle(self._seen[row])
        return steps

    def step(self, row: int, event: object) -> Step:
        """What an event does."""
        machine = self._machine(row)
        dispatch, message = machine.handle(event)
        seen = self._witness.after(self._seen[row], event, dispatch)
        to = self._rows.setdefault((machine.key(), seen), len(self._ways))
        if to == len(self._ways):
            self._ways.append((row, event))
            self._seen.append(seen)
            self.complete.append(self._witness.complete(seen))
            self._unused[to] = machine
        elif to == row:
            self._unused[row] = machine
        return Step(event, to, None if dispatch is None else dispatch.task, message)

    def _machine(self, row: int) -> Any:
        """A machine in this state, for one event: if need be a new one that is told what led there."""
        if (machine := self._unused.pop(row, None)) is not None:
            return machine
        events = []
        while row:
            row, event = self._ways[row]
            events.append(event)
        machine = self._make()
        for event in reversed(events):
            machine.handle(event)
        return machine


class Journal:
    """What the ranks of a group have dispatched since the slowest of them. Rows as in `Table`."""

    def __init__(self, ranks: int) -> None:
        start: tuple[tuple[Task, ...], tuple[int, ...]] = ((), (0,) * ranks)
        self._rows = {start: 0}
        self._all = [start]

    def dispatched(self, row: int, rank: int, task: Task) -> tuple[int, Task | None]:
        """The row after a rank's dispatch, and the task that from now on all ranks run, if there is one."""
        sequence, counts = self._all[row]
        at = counts[rank]
        sequence += (task,) if at == len(sequence) else ()
        require(sequence[at] == task, f"rank {rank} runs {task} where another has run {sequence[at]}")
        counts = (*counts[:rank], at + 1, *counts[rank + 1 :])
        common = None
        if min(counts):
            common, sequence, counts = sequence[0], sequence[1:], tuple(count - 1 for count in counts)
        to = self._rows.setdefault((sequence, counts), len(self._all))
        if to == len(self._all):
            self._all.append((sequence, counts))
        return to, common
