"""A reference world for the core: stage schedulers joined by links that deliver in any order.

It has its own small copy of the dependency rules, so that a wrong rule in the core cannot hide.
"""

import random
from dataclasses import dataclass, field

from rrfp_jax.core.events import ROOM, Accumulate, Arrived, Dispatch
from rrfp_jax.core.rules import Budget, StepRules
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Task


@dataclass
class World:
    """Runs one step, choosing at random among deliveries and offers of room."""

    rules: StepRules
    seed: int
    budgets: list[Budget | None] | None = None
    orders: list[list[Task]] = field(default_factory=list)
    added: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages = self.rules.placement.stages
        budgets = self.budgets or [None] * stages
        self.stages = [StageScheduler(s, self.rules, budgets[s]) for s in range(stages)]
        self.orders = [[] for _ in range(stages)]
        self.added = [[] for _ in range(stages)]
        self.in_transit: list[tuple[int, Task]] = []
        self.done: set[tuple[int, Task]] = set()
        self.random = random.Random(self.seed)

    def run(self) -> "World":
        while not all(s.finished for s in self.stages):
            moves = [("deliver", i) for i in range(len(self.in_transit))]
            moves += [("room", s) for s in range(len(self.stages))]
            self.random.shuffle(moves)
            if not any(self.move(*move) for move in moves):
                raise AssertionError(f"deadlock: {[s.awaited() for s in self.stages]}")
        return self

    def move(self, what: str, index: int) -> bool:
        if what == "deliver":
            stage, task = self.in_transit.pop(index)
            assert self.stages[stage].handle(Arrived(task)) == ()
            self.stages[stage].check_invariants()
            return True
        scheduler = self.stages[index]
        instructions = scheduler.handle(ROOM)
        scheduler.check_invariants()
        if not instructions:
            return False
        dispatch, *accumulate = instructions
        assert isinstance(dispatch, Dispatch) and all(isinstance(a, Accumulate) for a in accumulate)
        self.check_dependencies(index, dispatch.task)
        self.done.add((index, dispatch.task))
        self.orders[index].append(dispatch.task)
        self.added[index] += [(a.chunk, a.microbatch) for a in accumulate]
        destination = self.rules.placement.destination(index, dispatch.task)
        if destination is not None:
            self.in_transit.append(destination)
        return True

    def check_dependencies(self, stage: int, task: Task) -> None:
        """The model as a chain of virtual stages, laid out anew here."""
        assert (stage, task) not in self.done, f"{task} twice on stage {stage}"
        stages, placement = len(self.stages), self.rules.placement
        chain = []
        for chunk in range(placement.chunks):
            down = placement.shape == "looped" or chunk % 2 == 0
            chain += [(s, chunk) for s in (range(stages) if down else reversed(range(stages)))]
        v = chain.index((stage, task.chunk))

        def done(at: int, *kinds: Kind) -> bool:
            s, chunk = chain[at]
            return any((s, Task(kind, chunk, task.microbatch)) in self.done for kind in kinds)

        if task.kind is FORWARD:
            assert v == 0 or done(v - 1, FORWARD)
        elif task.kind is WEIGHT:
            assert done(v, INPUT)
        else:
            assert done(v, FORWARD) and not done(v, BACKWARD, INPUT)
            assert v == len(chain) - 1 or done(v + 1, BACKWARD, INPUT)
