"""Every state that the stages of one step can reach, whatever the moments at which things happen.

Theory of operation. The real machines of the core are driven: a `StageScheduler` or a group's machine for
each rank. Whatever has been sent and has not arrived may arrive next, in any order; each device may be given
room at any moment, also with inputs foreseen that are under way, whose tasks are then *early*. So a step's
behaviour is a graph whose nodes are what all ranks know and what is under way. A machine's state is told by
`key_of`: two ways that lead to equal keys go on alike and are merged. Breadth first, so that what is found
wrong is shown by the shortest way to it.

Each machine is a table, filled in as rows are reached. A state of the whole is one integer: the row of every
rank, the row of every group's journal, and one bit for every message under way; a step adds its difference.

When a task of a group ends, `Ends` says; only then are its outputs sent.

Each rank is watched by a `Witness`. Equal sequences inside groups are checked by journals. And from every
state the end must be within reach: one in which nothing can happen, or in which a group exchanges messages
for ever, is a deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from rrfp_jax.core.events import ROOM, Arrived, Room
from rrfp_jax.core.group import (
    ArrivalReport,
    GroupMessage,
    GroupProtocol,
    Member,
    Proposal,
    member,
    partners,
)
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Direction, Input, Task
from tests.verification.exploration.keys import key_of
from tests.verification.exploration.visits import Enough, Reach, Violation, never
from tests.verification.exploration.witness import Broken, Seen, Witness, require


def recipients(message: GroupMessage, ranks: int) -> Sequence[int]:
    """The ranks of a group of so many that a message is for."""
    if isinstance(message, ArrivalReport):
        return (0,)
    return partners(message.rank if isinstance(message, Proposal) else 0, ranks, "unanimous")


@dataclass(frozen=True)
class Delivered:
    """The input of an early task: one that has been dispatched before."""

    input: Input


class StateCheck(Protocol):
    """A check of states by what the rank of each stage has seen."""

    def check(self, seen: Sequence[Seen], early: Collection[tuple[int, Input]]) -> None:
        """Raises `Broken` if a state must not be; of each stage, the inputs whose tasks are early."""


Ends: TypeAlias = Literal["together", "apart", "first"]
"""Of a task of a group: once all ranks run it, by a collective; on each rank by itself; or so, and the first
sends for all, as to a narrower stage."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to explore."""

    rules: StepRules
    budgets: tuple[Budget, ...] | None = None
    ranks: int = 1
    protocol: GroupProtocol = "leader"
    ends: Ends = "together"
    any_choice: bool = False
    memory: StateCheck | None = None
    early: int = 0  # tasks of a stage that may be early, where memory is checked; else any number

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
        self._rows: dict[Hashable, int] = {(key_of(machine), seen): 0}
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
            runnable = self.runnable(row)
            rooms = [Room(frozenset(runnable) - {task}) for task in runnable]
        steps = [step for step in (self.step(row, room) for room in rooms) if step.row != row]
        if self._chooses and not steps:
            self._witness.check_idle(self._seen[row])
        return steps

    def runnable(self, row: int) -> list[Task]:
        """What could be chosen whose input is there."""
        machine = self._unused[row] = self._machine(row)
        return [task for way in Direction for task in machine.scheduler.view.runnable(way)]

    def step(self, row: int, event: object) -> Step:
        """What an event does."""
        machine = self._machine(row)
        dispatch, message = machine.handle(event)
        seen = self._witness.after(self._seen[row], event, dispatch)
        to = self._rows.setdefault((key_of(machine), seen), len(self._ways))
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


WIDTH = 24
ROW = (1 << WIDTH) - 1
"""A row's bits in a state: for more rows than fit into memory."""


class Move(NamedTuple):
    """A step of a rank as it changes the state of the whole: `(state + change) | sends`."""

    node: int
    step: Step
    change: int
    sends: int
    advances: bool


class Space:
    """The graph of a case's states, of which 0 is the start."""

    def __init__(self, case: Case, make: Maker = real) -> None:
        self.case = case
        stages, ranks = case.rules.placement.stages, case.ranks
        self._nodes = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
        self._tables = [Table(case, stage, rank, make) for stage, rank in self._nodes]
        self._journals = [Journal(ranks) for _ in range(stages if ranks > 1 else 0)]
        self._sent = WIDTH * (len(self._tables) + len(self._journals))  # where the bits of messages begin
        self._bits: dict[tuple[int, object], int] = {}
        self._messages: dict[int, tuple[int, object]] = {}
        self._rooms: list[dict[int, list[Move]]] = [{} for _ in self._nodes]
        self._receives: list[dict[int, dict[int, Move]]] = [{} for _ in self._nodes]
        self._foresights: list[dict[int, dict[frozenset[Input], Move | None]]] = [{} for _ in self._nodes]
        self._journeys: dict[tuple[int, int, int, Task], tuple[int, int]] = {}

    def finished(self, state: int) -> bool:
        """Whether all tasks of all ranks are done."""
        rows = [state >> WIDTH * node & ROW for node in range(len(self._tables))]
        return all(table.complete[row] for table, row in zip(self._tables, rows, strict=True))

    def check(self, state: int) -> None:
        """Have the case's own check look at a state."""
        if self.case.memory is not None:
            rows = [state >> WIDTH * node & ROW for node in range(len(self._tables))]
            seen = [table.seen(row) for table, row in zip(self._tables, rows, strict=True)]
            self.case.memory.check(seen, set(self._early(state)))

    def _early(self, state: int) -> Iterator[tuple[int, Input]]:
        """Of each node, the inputs whose tasks are early."""
        for bit in self._under_way(state):
            node, event = self._messages[bit]
            if isinstance(event, Delivered):
                yield node, event.input

    def _under_way(self, state: int) -> Iterator[int]:
        """The bits of all messages that have not come."""
        rest = state >> self._sent << self._sent
        while rest:
            bit = rest & -rest
            rest ^= bit
            yield bit

    def moves(self, state: int) -> Iterator[tuple[Move, int]]:
        """All that can happen next, and the state after it."""
        for node, rooms in enumerate(self._rooms):
            row = state >> WIDTH * node & ROW
            moves = rooms.get(row)
            if moves is None:
                moves = rooms[row] = [self._move(node, row, s) for s in self._tables[node].rooms(row)]
            for move in moves:
                yield move, self._after(state, move)
        coming: dict[int, list[Input]] = {}  # by node
        for bit in self._under_way(state):
            node, event = self._messages[bit]
            row = state >> WIDTH * node & ROW
            if isinstance(event, Arrived):
                coming.setdefault(node, []).append(event.input)
            if isinstance(event, Delivered):
                move = Move(node, Step(event, row, None, None), -bit, 0, True)
                yield move, self._after(state, move)
                continue
            known = self._receives[node].setdefault(row, {})
            received = known.get(bit)
            if received is None:
                received = known[bit] = self._move(node, row, self._tables[node].step(row, event), bit)
            yield received, self._after(state, received)
        if self.case.ranks == 1:  # groups foresee nothing
            for node, inputs in coming.items():
                if self.case.memory and sum(at == node for at, _ in self._early(state)) >= self.case.early:
                    continue
                for move in self._foreseeing(node, state >> WIDTH * node & ROW, inputs):
                    yield move, self._after(state, move)

    def _foreseeing(self, node: int, row: int, coming: Sequence[Input]) -> list[Move]:
        """What room does with each and with all of the inputs foreseen that are on their way."""
        known = self._foresights[node].setdefault(row, {})
        moves = []
        for foreseen in {frozenset(coming), *(frozenset([one]) for one in coming)}:
            if foreseen not in known:
                # For any choice it is what is foreseen, whatever else could run.
                others = frozenset(self._tables[node].runnable(row) if self.case.any_choice else ())
                step, taken, late = self._tables[node].step(row, Room(others, foreseen)), 0, 0
                if step.task is not None and step.task.input in foreseen:
                    taken = self._bit(node, Arrived(step.task.input))
                    late = self._bit(node, Delivered(step.task.input)) if self.case.memory else 0
                known[foreseen] = self._move(node, row, step, taken, late) if step.row != row else None
            if (move := known[foreseen]) is not None:
                moves.append(move)
        return moves

    def name(self, move: Move) -> str:
        """A move in words."""
        stage, rank = self._nodes[move.node]
        did = f"runs {move.step.task} on" if move.step.task is not None else "gets"
        return f"stage {stage}{f' rank {rank}' if self._journals else ''} {did} {move.step.event}"

    def _after(self, state: int, move: Move) -> int:
        state += move.change
        if state & move.sends:
            raise Broken(f"what is sent when {self.name(move)} is under way already")
        state |= move.sends
        if move.step.task is None or not self._journals:
            return state
        stage, rank = self._nodes[move.node]
        at = WIDTH * (len(self._tables) + stage)
        row = state >> at & ROW
        known = self._journeys.get((stage, row, rank, move.step.task))
        if known is None:
            known = self._journeys[stage, row, rank, move.step.task] = self._journey(stage, row, rank, move)
        change, sends = known
        return (state + change) | sends

    def _move(self, node: int, row: int, step: Step, taken: int = 0, sends: int = 0) -> Move:
        stage, rank = self._nodes[node]
        first = node - rank
        if step.message is not None:
            for to in recipients(step.message, self.case.ranks):
                sends |= self._bit(first + to, step.message)
        if step.task is not None and not (self._journals and self.case.ends == "together"):
            sends |= self._output(stage, rank, step.task)
        return Move(node, step, (step.row - row << WIDTH * node) - taken, sends, step.advances)

    def _journey(self, stage: int, row: int, rank: int, move: Move) -> tuple[int, int]:
        """How a dispatch changes its group's journal, and what that sends."""
        assert move.step.task is not None
        to, common = self._journals[stage].dispatched(row, rank, move.step.task)
        sends = 0
        if common is not None and self.case.ends == "together":
            for each in range(self.case.ranks):
                sends |= self._output(stage, each, common)
        return to - row << WIDTH * (len(self._tables) + stage), sends

    def _output(self, stage: int, rank: int, task: Task) -> int:
        """The bits of a task's output, which goes to the same rank of another stage; 0 if nobody needs it."""
        destination, ranks = self.case.rules.placement.destination(stage, task), self.case.ranks
        if destination is None:
            return 0
        receivers: Iterable[int] = [rank]
        if self.case.ends == "first":
            receivers = range(ranks if rank == 0 else 0)
        return sum(self._bit(destination[0] * ranks + each, Arrived(destination[1])) for each in receivers)

    def _bit(self, node: int, event: object) -> int:
        bit = self._bits.setdefault((node, event), 1 << self._sent + len(self._bits))
        self._messages[bit] = node, event
        return bit


def explore(case: Case, make: Maker = real, enough: Enough = never) -> Reach:
    """Visit all states of a case, or as many as are enough, and check each."""
    space = Space(case, make)
    before: dict[int, int] = {0: 0}
    queue = deque([0])
    quiet: dict[int, list[int]] = {}
    moves = 0
    while queue:
        if enough(len(before)):
            return Reach(len(before), moves, False)
        state = queue.popleft()
        after, advances = [], False
        try:
            space.check(state)
            for move, to in space.moves(state):
                after.append(to)
                advances |= move.advances
                if to not in before:
                    before[to] = state
                    queue.append(to)
        except Broken as broken:
            raise Violation(f"{broken}, after: {way(space, before, state)}") from broken
        moves += len(after)
        if not advances and not space.finished(state):
            quiet[state] = after
    if stuck := _stuck(quiet):
        raise Violation(f"deadlock, after: {way(space, before, stuck[0])}")
    return Reach(len(before), moves, True)


def _stuck(quiet: dict[int, list[int]]) -> list[int]:
    """Those of the states in which only messages move from which no other kind of state can be reached."""
    before: dict[int, list[int]] = {}
    for state, after in quiet.items():
        for to in after:
            before.setdefault(to, []).append(state)
    free = [to for to in before if to not in quiet]
    freed = set(free)
    while free:
        for state in before.get(free.pop(), ()):
            if state not in freed:
                freed.add(state)
                free.append(state)
    return [state for state in quiet if state not in freed]


def way(space: Space, before: dict[int, int], state: int) -> str:
    """The events that lead to a state."""
    names: list[str] = []
    while state:
        previous = before[state]
        names.append(next(space.name(move) for move, to in space.moves(previous) if to == state))
        state = previous
    return ", ".join(reversed(names)) or "nothing"
