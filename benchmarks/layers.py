"""Layers that last as long as they are told, on whichever stage they are: in virtual time, and in a
Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.runtime.engine.device import Running
from rrfp_jax.runtime.engine.pacing import Delays, JitteredQueue, QueueFactory
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.splits import FIRST, Balance, Move, RebalanceDecision
from rrfp_jax.studies.disturbances import Jittered
from rrfp_jax.studies.families import FORWARD_SECONDS, Family
from rrfp_jax.trace import jitter
from rrfp_jax.trace.costs import StepCosts, Workload, WorkloadCosts
from rrfp_jax.trace.jitter import LEVELS
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RecordedStep

SEEN = 20
"""Steps that a look sees at most, as a Trainer's."""

TRANSFER_SECONDS = 1e-4
WIDTH, ROWS = 16, 8


@dataclass(frozen=True)
class LayeredCosts(StepCosts):
    """A model cut by a split: seconds by layer of its forward; by stage, how many times as long all takes
    there.

    A fused backward takes twice as long as the forward, I and W half of that each.
    """

    work: Work
    seconds: Sequence[float]
    slowness: Sequence[float]
    placement: Placement

    @cached_property
    def forward(self) -> list[float]:
        stages = [self.placement.place(v)[0] for v in range(self.placement.last + 1)]
        return [
            self.slowness[stage] * sum(self.seconds[i] for i in layers)
            for stage, layers in zip(stages, self.work.ranges(), strict=True)
        ]

    def duration(self, stage: int, task: Task) -> float:
        forward = self.forward[self.placement.virtual_stage(stage, task.chunk)]
        return 2 * forward if task.kind is BACKWARD else forward

    def transfer(self, stage: int, task: Task) -> float:
        return TRANSFER_SECONDS


@dataclass
class Machine:
    """A model of layers on stages.

    Attributes:
        seconds: by layer, of its forward on a stage that is not slow.
        slowness: of the stages, at each step.
        estimates: what shapes say of the layers; None if they are right.
        limit: microbatches in flight; None for twice the stages.
        level, seed: of the jitter.
        family: what microbatches and links are like; one chunk a stage then. None if all are alike.
    """

    seconds: Sequence[float]
    slowness: Callable[[int], Sequence[float]]
    stages: int = 4
    estimates: Sequence[float] | None = None
    schedule: str = "bf"
    microbatches: int = 8
    limit: int | None = None
    level: str = "J0"
    seed: int = 0
    family: Family | None = None

    def work(self, split: Sequence[int]) -> Work:
        return Work([LayerWork("Block", estimate, 3) for estimate in self.estimates or self.seconds], split)

    def step(self, number: int, split: Sequence[int]) -> RecordedStep:
        schedule, work = by_name(self.schedule), self.work(tuple(split))
        placement = schedule.placement_for(self.stages)
        limit = self.limit or 2 * self.stages
        rules = StepRules(placement=placement, microbatches=self.microbatches, schedule=schedule, limit=limit)
        costs: StepCosts = LayeredCosts(work, self.seconds, self.slowness(number), placement)
        if self.family is not None:
            costs = WorkloadCosts(self.workload(number, split), placement)
        trace = simulate(rules, Jittered(costs, LEVELS[self.level], self.seed, number))
        buckets = [""] * self.microbatches
        return RecordedStep(
            trace=replace(trace, step=number), rules=rules, buckets=buckets, work=lambda: work
        )

    def workload(self, number: int, split: Sequence[int]) -> Workload:
        """What the family's step of this number takes, whose tasks are as long as their stage's layers."""
        assert self.family is not None
        factors = [
            [slow * sum(self.seconds[i] for i in own) / FORWARD_SECONDS] * self.microbatches
            for slow, own in zip(self.slowness(number), self.work(split).ranges(), strict=True)
        ]
        return self.family(self.stages, self.microbatches, number).actual.scaled(factors, factors)


@dataclass
class Trained:
    """Moves and looks, each with its step, and what steps took (s)."""

    moves: list[tuple[int, Move]] = field(default_factory=list)
    looks: list[tuple[int, RebalanceDecision]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def train(
    machine: Machine, split: Sequence[int], steps: int, pause: float = 0.1, refuse: bool = False
) -> Trained:
    """Train so many steps in virtual time. Every move is made at once, or none can be made if it is to be
    refused.

    A move, and compiling for it, takes `pause` seconds each.
    """
    balance, found, due = Balance(compile_seconds=pause), Trained(), FIRST
    recorded: list[RecordedStep] = []
    for number in range(steps):
        if len(recorded) == due:
            look = balance.look(recorded[-SEEN:], steps - number)
            found.looks.append((number, look))
            due += look.again
            if look.move is not None and refuse:
                balance.failed(look.move)
            elif look.move is not None:
                balance.moved(look.move, pause, pause)
                found.moves.append((number, look.move))
                split, recorded, due = look.move.split, [], FIRST
        recorded.append(machine.step(number, split))
        found.seconds.append(recorded[-1].trace.makespan)
    return found


@dataclass(frozen=True, kw_only=True)
class LayerPace(Delays):
    """Keeps a stage busy for as long as its layers take, under the split that `split` gives; see
    `LayeredCosts`."""

    seconds: Sequence[float] = ()
    slowness: Sequence[float] = ()
    split: list[Callable[[], Sequence[int]]] = field(default_factory=list, compare=False, repr=False)

    def __str__(self) -> str:
        return repr(self)

    def queue(self) -> QueueFactory:
        """Makes the queue of a device; see `Delays.queue`."""
        model = jitter.Jitter(jitter.by_name(self.jitter), self.seed)

        def delay(running: Running, computed: float) -> float:
            sizes = self.split[0]()
            first = sum(sizes[: running.stage])
            own = sum(self.seconds[first : first + sizes[running.stage]]) * self.slowness[running.stage]
            own *= 1 if running.task.kind is FORWARD else 2
            own += model.delay(running.step, running.stage, running.task, own)
            return max(own - computed, 0.0)

        return lambda name, wake: JitteredQueue(name, wake, delay)


def trainer(
    seconds: Sequence[float],
    slowness: Sequence[float],
    split: Sequence[int],
    microbatches: int,
    level: str = "J0",
    **settings: Any,
) -> rrfp.Trainer:
    """A model of as many equal layers, one chunk on each stage; `level` of the jitter; `split` at first."""

    def block(weight: Any, carry: Any, mb: Any) -> Any:
        x = mb["x"] if carry is None else carry
        return x + jnp.tanh(x @ weight)

    def init(key: jax.Array) -> Any:
        return jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5

    pace = LayerPace(jitter=level, seconds=tuple(seconds), slowness=tuple(slowness))
    random = np.random.default_rng(0)
    made = rrfp.Trainer(
        rrfp.Pipeline(
            [rrfp.layer(block, init=init, repeat=len(seconds))],
            lambda x, mb: rrfp.Loss((x**2).sum(), weight=x.shape[0]),
        ),
        optax.adamw(1e-3),
        data=[{"x": random.normal(size=(ROWS, WIDTH)).astype(np.float32)} for _ in range(microbatches)],
        mesh=rrfp.Mesh(pp=len(slowness)),
        split=list(split),
        settings=rrfp.Settings(delays=pace, **settings),
    )
    pace.split.append(lambda: made.split)
    return made
