"""Whether the stages can follow their fixed orders to the end together, or must wait for ever."""

from __future__ import annotations

from rrfp_jax.core.events import ROOM, Arrived
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules


def check_can_end(rules: StepRules) -> None:
    """Run the step without time: whatever a stage can do it does, until all is done or nobody can go on.

    Durations cannot matter: a fixed order has no choice, so whoever waits for ever here waits for ever. A
    stage waits for the input of its next task, or, if that is a B or W, for a place for its gradient: then
    its own order parks more gradients than there are spare buffers.

    Raises:
        ValueError: an incomplete order, or orders that wait for ever, saying who for what.
    """
    stages = [StageScheduler(stage, rules) for stage in range(rules.placement.stages)]
    todo = list(range(len(stages)))
    while todo:
        stage = todo.pop()
        while dispatch := stages[stage].handle(ROOM):
            destination = rules.placement.destination(stage, dispatch.task)
            if destination is not None:
                stages[destination[0]].handle(Arrived(destination[1]))
                todo.append(destination[0])
    stuck = [f"stage {s.stage} waits for {s.awaited()}" for s in stages if not s.finished]
    if stuck:
        title = rules.schedule.title if isinstance(rules.schedule, FixedOrder) else str(rules.schedule)
        raise ValueError(f"{title} must deadlock: {'; '.join(stuck)}")
