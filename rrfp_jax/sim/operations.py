"""A step as scheduling theory sees it: operations on machines (the stages), each after at most one other.

A microbatch is a tree. F(0) ... F(last), B(last) ... B(0) is a chain; if a backward is split, I stands for B
and has a W as a branch. The *head* of an operation is the shortest time before its start, its *tail* the
shortest time after its end. Both are what its tree demands even if no stage is ever busy with other
microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from rrfp_jax.core.measure.costs import Costs
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD, INPUT, WEIGHT, Direction, Task


@dataclass(eq=False, slots=True)
class Operation:
    """A task and its times (s).

    Attributes:
        stage: where it runs.
        task: what it is.
        duration: how long it keeps the stage busy.
        follows: the operation whose output it needs; None if it can run at once.
        lag: from the end of that one to the arrival of its output.
        head: shortest time before its start.
        tail: shortest time after its end.
    """

    stage: int
    task: Task
    duration: float
    follows: Operation | None
    lag: float
    head: float
    tail: float = 0.0


def operations(rules: StepRules, costs: Costs) -> list[Operation]:
    """All operations of a step, split as its schedule says, by microbatch, each after what it needs.

    The costs must not depend on the order in which they are asked for.

    Raises:
        ValueError: what the core refuses of the rules.
    """
    placement = rules.placement
    stages = [StageScheduler(stage, rules) for stage in range(placement.stages)]
    found: list[Operation] = []

    def add(stage: int, task: Task, follows: Operation | None) -> Operation:
        head = lag = 0.0
        if follows is not None:
            lag = 0.0 if follows.stage == stage else costs.transfer(follows.stage, follows.task)
            head = follows.head + follows.duration + lag
        found.append(Operation(stage, task, costs.duration(stage, task), follows, lag, head))
        return found[-1]

    places = [placement.place(v) for v in range(placement.last + 1)]
    for j in range(rules.microbatches):
        last = None
        for stage, chunk in places:
            last = add(stage, Task(FORWARD, chunk, j), last)
        for stage, chunk in () if rules.forward_only else reversed(places):
            last = add(stage, stages[stage].task_for(Direction.BACKWARD, chunk, j), last)
            if last.task.kind is INPUT:
                add(stage, Task(WEIGHT, chunk, j), last)
    for operation in reversed(found):
        if (before := operation.follows) is not None:
            before.tail = max(before.tail, operation.lag + operation.duration + operation.tail)
    return found
