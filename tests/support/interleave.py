"""A reference world for the core: links in any order, witnesses, invariants, and replay of logs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rrfp_jax.core.events import ROOM, Arrived, Dispatch, Room
from rrfp_jax.core.group import Alone
from rrfp_jax.core.progress import DISPATCHED, READY, WAITING, ReadyBy
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import CHARGES, KINDS, Task
from tests.verification.exploration.space import Case, real, recipients
from tests.verification.exploration.visits import Violation
from tests.verification.exploration.witness import Seen, Witness


def check_invariants(scheduler):
    progress, rules = scheduler._progress, scheduler.rules
    check_rows(progress)
    every = [task for rows in rules.names.values() for row in rows for task in row]
    past = [task.kind for task in every if progress.state(task) == DISPATCHED]
    assert len(past) + scheduler._remaining == scheduler.tasks
    if rules.charges_by_chunk and not rules.forward_only:
        held = sum(CHARGES[kind] for kind in past)
        assert held == scheduler.in_flight, f"{held} in flight, {scheduler.in_flight} accounted for"
    if (limit := rules.admission_limit) is not None:
        most = limit * rules.placement.chunks
        assert scheduler.in_flight <= most, f"{scheduler.in_flight} in flight, limit {most}"
    accumulator = scheduler._accumulator
    assert accumulator.parked <= accumulator.spare
    if scheduler.finished:
        assert not scheduler.ready_tasks() and scheduler.in_flight == 0 and accumulator.parked == 0


def check_rows(progress):
    for row in progress.all_rows:
        ready = [task for task, state in zip(row.tasks, row.states, strict=True) if state == READY]
        assert list(row) == ready
        assert row.ready == len(ready)
        assert row.lowest == (ready[0].microbatch if ready else -1)
        for j, task in enumerate(row.tasks if row.predecessor else ()):
            before, after = row.predecessor.tasks[j], KINDS[task.kind].after
            past = row.predecessor.states[j] == DISPATCHED and before.kind is after
            assert past or row.states[j] == WAITING, f"{task} before {before}"
            if row.by is ReadyBy.PREDECESSOR and not progress._forward_only:
                assert past == (row.states[j] != WAITING), f"{task} is ready when {before} is dispatched"


class ReplayError(RuntimeError):
    """The same events led to another task."""


def replay(logged: StageScheduler) -> StageScheduler:
    """Tell a new scheduler of the same rules the same events, and compare what it dispatches."""
    if len(logged.log) == logged.log.maxlen:  # some may have been dropped
        raise ValueError(
            f"stage {logged.stage}: the log holds only the latest {len(logged.log)} entries, and a "
            "replay must begin with the step: give the scheduler a class with `kept = None`"
        )
    scheduler = StageScheduler(logged.stage, logged.rules, logged.budget)
    for number, (event, before) in enumerate(logged.log):
        dispatch = scheduler.handle(event)
        now = None if dispatch is None else dispatch.task
        if now != before:
            raise ReplayError(f"stage {logged.stage}, event {number}, {event}: {before} before, {now} now")
    return scheduler


PATIENCE = 10_000


@dataclass
class World:
    """Runs one step, choosing at random among deliveries and offers of room."""

    rules: StepRules
    seed: int
    budgets: tuple[Budget, ...] | None = None
    ranks: int = 1
    protocol: str = "leader"
    checked: float = 1.0  # how often the passes over all tasks are done
    orders: list[list[Task]] = field(default_factory=list)
    added: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages, ranks = self.rules.placement.stages, self.ranks
        case = Case(rules=self.rules, budgets=self.budgets, ranks=ranks, protocol=self.protocol)
        nodes = range(stages * ranks)
        self.machines = [real(case, node // ranks, node % ranks) for node in nodes]
        self.witnesses = [Witness(node // ranks, self.rules, case.budget(node // ranks)) for node in nodes]
        self.seen: list[Seen] = [witness.start() for witness in self.witnesses]
        self.orders, self.added = [[] for _ in nodes], [[] for _ in nodes]
        self.under_way: list[tuple[int, object]] = []
        self.awake = list(nodes)
        self.idle_events = 0  # since the latest dispatch
        self.random = random.Random(self.seed)
        self.foresight = self.random.choice([0.0, 0.5, 1.0])  # what share of what comes is foreseen
        self.eagerness = self.random.choice([0.1, 0.5, 0.9])  # how much likelier room is than a delivery

    def run(self) -> World:
        while self.awake or self.under_way:
            rooms = self.random.random() < self.eagerness
            if self.awake and (rooms or not self.under_way):
                self.offer_room(self.awake.pop(self.random.randrange(len(self.awake))))
            else:
                self.tell(*self.under_way.pop(self.random.randrange(len(self.under_way))))
        if not all(w.complete(seen) for w, seen in zip(self.witnesses, self.seen, strict=True)):
            raise Violation(f"deadlock: {[str(machine.awaited()) for machine in self.machines]}")
        return self

    def offer_room(self, node: int) -> None:
        """Room, at times with some of what is on its way there foreseen."""
        coming = [event.input for to, event in self.under_way if to == node and isinstance(event, Arrived)]
        foreseen = frozenset(one for one in coming if self.random.random() < self.foresight)
        if foreseen and self.ranks == 1:
            before = len(self.orders[node])
            self.tell(node, Room(foreseen=foreseen))
            for task in self.orders[node][before:]:
                if task.input in foreseen:
                    self.under_way.remove((node, Arrived(task.input)))
        else:
            self.tell(node, ROOM)

    def tell(self, node: int, event: object) -> None:
        machine, witness = self.machines[node], self.witnesses[node]
        self.idle_events += 1
        assert self.idle_events < PATIENCE, "messages are exchanged for ever, and nothing is dispatched"
        dispatch, message = machine.handle(event)
        self.seen[node] = witness.after(self.seen[node], event, dispatch)
        if self.random.random() < self.checked:
            check_invariants(machine.scheduler)
            if isinstance(event, Room) and dispatch is None and isinstance(machine, Alone):
                witness.check_idle(self.seen[node])
        if message is not None:
            first = node - node % self.ranks
            self.under_way += [(first + to, message) for to in recipients(message, self.ranks)]
        if dispatch is not None:
            self.follow(node, dispatch)
        if (not isinstance(event, Room) or dispatch or message) and node not in self.awake:
            self.awake.append(node)

    def follow(self, node: int, dispatch: Dispatch) -> None:
        task, additions, _ = dispatch
        self.orders[node].append(task)
        self.check_group(node)
        self.send_outputs(node, task)
        self.idle_events = 0
        self.added[node] += [(task.chunk, microbatch) for microbatch in additions]

    def check_group(self, node: int) -> None:
        """All ranks of a group dispatch one sequence, each as far as it is."""
        first = node - node % self.ranks
        at, order = len(self.orders[node]) - 1, self.orders[node]
        for other in self.orders[first : first + self.ranks]:
            assert at >= len(other) or other[at] == order[at], f"{order[at]} and {other[at]} at once"

    def send_outputs(self, node: int, task: Task) -> None:
        """Programs hold collectives: a task ends once all ranks of the group run it."""
        stage = node // self.ranks
        group = range(stage * self.ranks, (stage + 1) * self.ranks)
        destination = self.rules.placement.destination(stage, task)
        if destination is not None and all(task in self.seen[each].dispatched for each in group):
            to, receiver = destination
            self.under_way += [(to * self.ranks + rank, Arrived(receiver)) for rank in range(self.ranks)]
