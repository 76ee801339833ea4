"""The device of a stage in virtual time, with the stage's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rrfp_jax.core.events import Arrived
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Direction, Kind, Task

Routes: TypeAlias = "Mapping[Kind, Sequence[tuple[Device, Sequence[Arrived]] | None]]"


class Device:
    """What one stage's device does.

    Attributes:
        stage: whose it is.
        scheduler: of the stage.
        tasks: how many it has that have not ended.
        held: how many transfers keep it from computing.
        waiting: what has to happen as soon as it does not compute, if links are synchronous.
        free: when it ends the last of its tasks (s).
        busy: for how long it has computed, to the end of the last of its tasks (s).
        room: from when on another task may be queued behind the running one (s).
        ready: when each task became ready, `[kind or direction][chunk][microbatch]` (s).
        routes: where outputs go, `[kind][chunk]`: the device, and the event there, by microbatch.
    """

    __slots__ = ("busy", "free", "held", "ready", "room", "routes", "scheduler", "stage", "tasks", "waiting")

    def __init__(self, stage: int, rules: StepRules, budget: Budget | None) -> None:
        self.stage = stage
        self.scheduler = StageScheduler(stage, rules, budget)
        self.tasks = self.held = 0
        self.free = self.busy = self.room = 0.0
        self.waiting: list[Callable[[float], None]] = []
        chunks, microbatches = rules.placement.chunks, rules.microbatches
        forward, backward, weight = ([[0.0] * microbatches for _ in range(chunks)] for _ in range(3))
        self.ready: dict[Kind | Direction, list[list[float]]] = {
            **{FORWARD: forward, BACKWARD: backward, INPUT: backward, WEIGHT: weight}
        }
        self.routes: Routes = {}


def connect(devices: Sequence[Device], rules: StepRules) -> None:
    """Give every device its routes."""
    placement, chunks = rules.placement, range(rules.placement.chunks)
    arrivals = {
        kind.direction: [[Arrived(task.input) for task in row] for row in rules.names[kind]]
        for kind in (FORWARD, BACKWARD)
    }

    def route(stage: int, task: Task) -> tuple[Device, Sequence[Arrived]] | None:
        destination = placement.destination(stage, task)
        if destination is None:
            return None
        to, (direction, chunk, _) = destination
        return devices[to], arrivals[direction][chunk]

    for device in devices:
        device.routes = {kind: [route(device.stage, Task(kind, c, 0)) for c in chunks] for kind in Kind}
