"""Every state that the stages of one step can reach, whatever the moments at which things happen.

Theory of operation. The real machines of the core are driven: a `StageScheduler` or a group's machine for each
rank. Whatever has been sent and has not arrived may arrive next, in any order; each device may be given room at
any moment. So a step's behaviour is a graph whose nodes are what all ranks know and what is under way. A
machine's state is told by its `key()`; two ways that lead to equal keys go on alike and are merged.

What a machine does with an event in a state is worked out once, by a new machine to which the events that led
there are told again, and remembered: the machines become tables, and a state of the whole is a tuple of row
numbers with a bit for every message under way. Breadth first, so that what is found wrong is shown by the
shortest way to it.

A task of a group with collectives ends once all its ranks run it, and only then is its output sent.

Each rank is watched by a `Witness`; equal sequences inside groups are checked here, and that the end can be
reached from everywhere: a state in which nothing can happen, or in which ranks only exchange proposals for
ever, is a deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from benchmarks.witness import Broken, Witness, require
from rrfp_jax.core.events import ROOM, Accumulate, Arrived, Dispatch, Room
from rrfp_jax.core.group import Agreement, Member, Message, member, recipients
from rrfp_jax.core.rules import Budget, StepRules
from rrfp_jax.core.scheduler import DIRECTIONS, StageScheduler
from rrfp_jax.core.tasks import Task

State: TypeAlias = tuple[int, ...]
"""Row numbers of all ranks, of all groups' journals where there are groups, and the bits under way."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to explore.

    Attributes:
        budgets: per stage; None for none.
        ranks: per stage.
        collectives: whether a task ends only once all ranks of its group run it.
        any_choice: instead of what the hint prefers, try every task that can run.
    """

    rules: StepRules
    budgets: tuple[Budget, ...] | None = None
    ranks: int = 1
    agreement: Agreement = "leader"
    collectives: bool = True
    any_choice: bool = False


class Violation(AssertionError):
    """Something that must never happen, with the events that lead to it."""


Maker: TypeAlias = Callable[[Case, int, int], Member]


def machine(case: Case, stage: int, rank: int, scheduler: type[StageScheduler] = StageScheduler) -> Member:
    """The core's machine for one rank."""
    budget = case.budgets[stage] if case.budgets else None
    return member(scheduler(stage, case.rules, budget), rank, case.ranks, case.agreement)


class Rank:
    """A machine and its witness."""

    def __init__(self, case: Case, stage: int, rank: int, make: Maker) -> None:
        self.case = case
        self.machine: Any = make(case, stage, rank)
        self.witness = Witness(stage, case.rules, case.budgets[stage] if case.budgets else None)

    def key(self) -> Hashable:
        """All that its future depends on."""
        return self.machine.key(), self.witness.key()

    def handle(self, event: Any) -> tuple[Task | None, list[Message]]:
        """What it dispatches, and what it sends to its group."""
        if isinstance(event, Arrived):
            self.witness.arrived(event.task)
        task, messages = None, []
        for instruction in self.machine.handle(event):
            if isinstance(instruction, Dispatch):
                require(task is None, "two tasks are dispatched at once")
                task = instruction.task
                self.witness.dispatched(task)
            elif isinstance(instruction, Accumulate):
                self.witness.added(instruction.chunk, instruction.microbatch)
            else:
                messages.append(instruction)
        self.witness.check_limits()
        return task, messages

    def rooms(self) -> list[Room]:
        """The ways to be given room: one, or, for any choice, with all tasks late but one."""
        if not self.case.any_choice:
            return [ROOM]
        runnable = [task for direction in DIRECTIONS for task in self.machine.runnable(direction)]
        return [Room(frozenset(runnable) - {task}) for task in runnable]


class Step(NamedTuple):
    """What an event does to a rank: its next row, the task that it dispatches, the bits that it sends."""

    event: Any
    to: int
    task: Task | None
    sends: int

    @property
    def advances(self) -> bool:
        """Whether the step as a whole is nearer to its end."""
        return self.task is not None or isinstance(self.event, Arrived)


class Table:
    """A rank's machine as a table, filled in as it is asked for."""

    def __init__(self, make: Callable[[], Rank], post: Callable[[Message], int]) -> None:
        self._make, self._post = make, post
        self._rows: dict[Hashable, int] = {make().key(): 0}
        self._ways: list[tuple[int, Any]] = [(0, None)]  # the row before each, and the event that led on
        self._rooms: list[tuple[Step, ...] | None] = [None]
        self._steps: list[dict[Any, Step]] = [{}]
        self.complete: list[bool] = [False]

    def rooms(self, row: int) -> tuple[Step, ...]:
        """What room can do: nothing, or one step for every way to be given it."""
        steps = self._rooms[row]
        if steps is None:
            found = [self.step(row, room) for room in self._rank(row).rooms()]
            steps = self._rooms[row] = tuple(step for step in found if step.to != row)
        return steps

    def step(self, row: int, event: Any) -> Step:
        """What an event does."""
        step = self._steps[row].get(event)
        if step is None:
            rank = self._rank(row)
            task, messages = rank.handle(event)
            sends = sum(map(self._post, messages))
            step = self._steps[row][event] = Step(event, self._row(rank, row, event), task, sends)
        return step

    def _row(self, rank: Rank, before: int, event: Any) -> int:
        key = rank.key()
        row = self._rows.setdefault(key, len(self._ways))
        if row == len(self._ways):
            self._ways.append((before, event))
            self._rooms.append(None)
            self._steps.append({})
            self.complete.append(rank.witness.complete())
        return row

    def _rank(self, row: int) -> Rank:
        """A machine in this state, made by telling a new one what led there."""
        events = []
        while row:
            row, event = self._ways[row]
            events.append(event)
        rank = self._make()
        for event in reversed(events):
            rank.handle(event)
        return rank


class Journals:
    """What the ranks of a group have dispatched since the slowest of them, as a table."""

    def __init__(self, ranks: int) -> None:
        start: tuple[tuple[Task, ...], tuple[int, ...]] = ((), (0,) * ranks)
        self._rows = {start: 0}
        self._all = [start]
        self._memo: dict[tuple[int, int, Task], tuple[int, Task | None]] = {}

    def dispatched(self, row: int, rank: int, task: Task) -> tuple[int, Task | None]:
        """The row after a rank's dispatch, and the task that all ranks run now, if one is.

        Raises:
            Broken: others have dispatched another task at this position.
        """
        known = self._memo.get((row, rank, task))
        if known is None:
            sequence, counts = self._all[row]
            at = counts[rank]
            sequence += (task,) if at == len(sequence) else ()
            require(sequence[at] == task, f"rank {rank} dispatches {task} where another has {sequence[at]}")
            counts = (*counts[:rank], at + 1, *counts[rank + 1 :])
            common = None
            if min(counts):
                common, sequence, counts = sequence[0], sequence[1:], tuple(count - 1 for count in counts)
            to = self._rows.setdefault((sequence, counts), len(self._all))
            if to == len(self._all):
                self._all.append((sequence, counts))
            known = self._memo[row, rank, task] = to, common
        return known


class Space:
    """The graph of a case's states."""

    def __init__(self, case: Case, make: Maker = machine) -> None:
        self.case = case
        self._stages, self._ranks = case.rules.placement.stages, case.ranks
        self._nodes = [(stage, rank) for stage in range(self._stages) for rank in range(self._ranks)]
        self._bits: dict[tuple[int, Any], int] = {}
        self._messages: dict[int, tuple[int, Any]] = {}
        self._tables = [self._table(stage, rank, make) for stage, rank in self._nodes]
        self._journals = [Journals(self._ranks) for _ in range(self._stages)]
        self._outputs: dict[tuple[int, int, Task], int] = {}
        journals = (0,) * (self._stages if self._ranks > 1 else 0)
        self.start: State = (*(0 for _ in self._nodes), *journals, 0)

    def finished(self, state: State) -> bool:
        """Whether all tasks of all ranks are done."""
        return all(table.complete[row] for table, row in zip(self._tables, state, strict=False))

    def moves(self, state: State) -> Iterator[tuple[int, Step, State]]:
        """All that can happen next: on which node, what, and the state after it."""
        under_way = state[-1]
        for node, table in enumerate(self._tables):
            for step in table.rooms(state[node]):
                yield node, step, self._after(state, node, step, under_way)
        rest = under_way
        while rest:
            bit = rest & -rest
            rest ^= bit
            node, event = self._messages[bit]
            step = self._tables[node].step(state[node], event)
            yield node, step, self._after(state, node, step, under_way ^ bit)

    def name(self, node: int) -> str:
        """A rank as messages call it."""
        stage, rank = self._nodes[node]
        return f"stage {stage}" + (f", rank {rank}" if self._ranks > 1 else "")

    def _after(self, state: State, node: int, step: Step, under_way: int) -> State:
        under_way |= step.sends
        head, tail = state[:node], state[node + 1 : -1]
        if step.task is None:
            return (*head, step.to, *tail, under_way)
        stage, rank = self._nodes[node]
        if self._ranks == 1:
            return (*head, step.to, *tail, under_way | self._output(stage, rank, step.task))
        at = len(self._nodes) - node - 1 + stage  # of the journal in what follows this node
        to, common = self._journals[stage].dispatched(tail[at], rank, step.task)
        if not self.case.collectives:
            under_way |= self._output(stage, rank, step.task)
        elif common is not None:
            for each in range(self._ranks):
                under_way |= self._output(stage, each, common)
        return (*head, step.to, *tail[:at], to, *tail[at + 1 :], under_way)

    def _output(self, stage: int, rank: int, task: Task) -> int:
        """The bit of a task's output, which goes to the same rank of another stage; 0 if nobody needs it."""
        known = self._outputs.get((stage, rank, task))
        if known is None:
            destination = self.case.rules.placement.destination(stage, task)
            known = 0
            if destination is not None:
                known = self._bit(destination[0] * self._ranks + rank, Arrived(destination[1]))
            self._outputs[stage, rank, task] = known
        return known

    def _bit(self, node: int, event: Any) -> int:
        bit = self._bits.setdefault((node, event), 1 << len(self._bits))
        self._messages[bit] = node, event
        return bit

    def _table(self, stage: int, rank: int, make: Maker) -> Table:
        def post(message: Message) -> int:
            to = recipients(message, self._ranks)
            return sum(self._bit(stage * self._ranks + each, message) for each in to)

        return Table(lambda: Rank(self.case, stage, rank, make), post)


@dataclass(frozen=True)
class Reach:
    """How much was seen of a case, and whether that is all of it."""

    states: int
    transitions: int
    whole: bool


def explore(case: Case, make: Maker = machine, most: int | None = None) -> Reach:
    """Visit the states of a case, up to so many, and check each.

    Raises:
        Violation: with the shortest way to what is wrong.
    """
    space = Space(case, make)
    before: dict[State, State | None] = {space.start: None}
    queue, quiet, transitions = deque([space.start]), {}, 0
    while queue:
        if most is not None and len(before) >= most:
            return Reach(len(before), transitions, False)
        state = queue.popleft()
        after, advances = [], False
        try:
            for _, step, to in space.moves(state):
                transitions += 1
                advances = advances or step.advances
                after.append(to)
                if to not in before:
                    before[to] = state
                    queue.append(to)
        except Broken as broken:
            raise Violation(f"{broken}, after {way(space, before, state)}") from broken
        if not advances and not space.finished(state):
            quiet[state] = after
    if stuck := _stuck(quiet):
        raise Violation(f"deadlock after {way(space, before, stuck[0])}")
    return Reach(len(before), transitions, True)


def _stuck(quiet: dict[State, list[State]]) -> list[State]:
    """Those of the states in which only messages move from which no other kind of state can be reached."""
    stuck = dict(quiet)
    while freed := [state for state, after in stuck.items() if any(to not in stuck for to in after)]:
        for state in freed:
            del stuck[state]
    return list(stuck)


def way(space: Space, before: dict[State, State | None], state: State) -> str:
    """The events that lead to a state."""
    names: list[str] = []
    at: State | None = state
    while at is not None and (previous := before[at]) is not None:
        node, step = next((node, step) for node, step, to in space.moves(previous) if to == at)
        what = f"runs {step.task}" if step.task is not None else f"gets {step.event}"
        names.append(f"{space.name(node)} {what}")
        at = previous
    return ", ".join(reversed(names)) or "nothing"
