"""Training in virtual time, on a machine whose layers and stages have times of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.studies.layered import LayeredCosts
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.disturbances import Jittered
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.families import FORWARD_SECONDS, Family
from rrfp_jax.sim.splits import FIRST, Balance, Move, RebalanceDecision
from rrfp_jax.trace.costs import StepCosts, Workload, WorkloadCosts
from rrfp_jax.trace.jitter import LEVELS
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RecordedStep

SEEN = 20
"""Steps that a look sees at most, as a Trainer's."""


@dataclass
class Machine:
    """A model of layers on stages.

    Attributes:
        seconds: by layer, of its forward on a stage that is not slow.
        slowness: of the stages, at each step.
        stages: how many there are.
        estimates: what shapes say of the layers; None if they are right.
        schedule, microbatches: of each step.
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
        """The layers, cut so."""
        return Work([LayerWork("Block", estimate, 3) for estimate in self.estimates or self.seconds], split)

    def step(self, number: int, split: Sequence[int]) -> RecordedStep:
        """A step with a split."""
        schedule = by_name(self.schedule)
        placement = schedule.placement_for(self.stages)
        limit = self.limit or 2 * self.stages
        rules = StepRules(placement=placement, microbatches=self.microbatches, schedule=schedule, limit=limit)
        work = self.work(tuple(split))
        costs = self._costs(number, work, placement)
        trace = simulate(rules, Jittered(costs, LEVELS[self.level], self.seed, number))
        buckets = [""] * self.microbatches
        return RecordedStep(
            trace=replace(trace, step=number), rules=rules, buckets=buckets, work=lambda: work
        )

    def _costs(self, number: int, work: Work, placement: Placement) -> StepCosts:
        if self.family is None:
            return LayeredCosts(work, self.seconds, self.slowness(number), placement, transfer_seconds=1e-4)
        return WorkloadCosts(self.workload(number, work.split), placement)

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
    """Train so many steps. Every move is made at once, or none can be made if it is to be refused.

    Args:
        machine: to train on.
        split: at first.
        steps: how many.
        pause: of each move, and of compiling for it (s).
        refuse: whether no move can be made.
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
