"""A reference world for the core: stage schedulers joined by links that deliver in any order.

It has its own small copy of the dependency rules, so that a wrong rule in the core cannot hide.
"""

import random
from dataclasses import dataclass, field

from rrfp_jax.core.events import ROOM, Accumulate, Arrived, Dispatch
from rrfp_jax.core.scheduler import StageScheduler, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task


@dataclass
class World:
    """Runs one step, choosing at random among deliveries and offers of room."""

    rules: StepRules
    seed: int
    orders: list[list[Task]] = field(default_factory=list)
    added: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages = self.rules.placement.stages
        self.stages = [StageScheduler(s, self.rules) for s in range(stages)]
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
        stages, last = len(self.stages), len(self.stages) * self.rules.placement.chunks - 1
        v = task.chunk * stages + stage
        assert (stage, task) not in self.done, f"{task} twice on stage {stage}"
        if task.kind is FORWARD and v > 0:
            before = v - 1
            assert (before % stages, Task(FORWARD, before // stages, task.microbatch)) in self.done
        if task.kind is BACKWARD:
            assert (stage, Task(FORWARD, task.chunk, task.microbatch)) in self.done
            if v < last:
                after = v + 1
                assert (after % stages, Task(BACKWARD, after // stages, task.microbatch)) in self.done
