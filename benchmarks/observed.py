"""What the tasks, messages and choices of a run took, and from that: what another step would take.

A step is simulated a number of times. Each time every task takes what one of the run's tasks of that kind,
bucket and virtual stage took, drawn at random; so do its messages. The prediction is the median of these step
times. Medians of the tasks themselves would not do: what delays a task now and then makes the sum of many
longer, and a stage waits for the latest of several. Of messages those count that a stage waited for. Between
the end of a task and the choice of the next lies what is usual on the stage.

If the other step has its layers elsewhere, a task takes the shares that its layers have in the run's.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from statistics import median
from typing import NamedTuple

from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.splits import Layers
from rrfp_jax.trace.costs import TableCosts
from rrfp_jax.trace.records import RecordedStep, StepTrace
from rrfp_jax.trace.replayed import Place, replay_of

DRAWS = 15
"""Simulations for a prediction."""


class TaskOf(NamedTuple):
    """Tasks that take alike: of a virtual stage, a kind and a bucket."""

    virtual_stage: int
    kind: Kind
    bucket: str


class Link(NamedTuple):
    """Messages that take alike: between two stages, in either direction of the model, of a bucket."""

    stages: frozenset[int]
    forward: bool
    bucket: str


class Samples(NamedTuple):
    """Of a run (s).

    Attributes:
        tasks: of each kind.
        messages: of each kind, those that a stage waited for.
        between: the same between two stages, of whatever kind; all if none was waited for.
        leads: by stage, how long before a task's end the next one was chosen.
    """

    tasks: Mapping[TaskOf, Sequence[float]]
    messages: Mapping[Link, Sequence[float]]
    between: Mapping[frozenset[int], Sequence[float]]
    leads: Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Observed:
    """A run's steps; all have run by the same rules, with the same layers on each virtual stage.

    Attributes:
        steps: at least one.
    """

    steps: Sequence[RecordedStep]

    @cached_property
    def layers(self) -> Layers | None:
        """The model's; None if nobody knows them."""
        return Layers.of(self.steps)

    @cached_property
    def _samples(self) -> Samples:
        tasks, leads = defaultdict(list), defaultdict(list)
        messages, late, between = defaultdict(list), defaultdict(list), defaultdict(list)
        for step in self.steps:
            placement, replay = step.rules.placement, replay_of(step.trace)
            for (stage, task), seconds in replay.costs.durations.items():
                place = placement.virtual_stage(stage, task.chunk)
                tasks[TaskOf(place, task.kind, step.buckets[task.microbatch])].append(seconds)
            awaited = _awaited(step.trace)
            for (stage, task), seconds in replay.costs.transfers.items():
                link = _link(placement, stage, task, step.buckets)
                if (stage, task) in awaited:
                    messages[link].append(seconds)
                    between[link.stages].append(seconds)
                else:
                    late[link.stages].append(seconds)
            for (stage, _), seconds in replay.leads.items():
                leads[stage].append(seconds)
        return Samples(tasks, messages, late | between, leads)

    def predicted(self, other: RecordedStep) -> float:
        """What a step takes that ran by other rules (s); of it only these and its microbatches are looked
        at."""
        found = []
        for number in range(DRAWS):
            costs, leads = self._drawn(other, random.Random(number))
            found.append(
                simulate(other.rules, costs, budgets=other.budgets, lead=other.lead, leads=leads).makespan
            )
        return median(found)

    def _drawn(self, other: RecordedStep, draw: random.Random) -> tuple[TableCosts, Mapping[Place, float]]:
        placement, shares = other.rules.placement, self._shares(other)
        durations: dict[Place, float] = {}
        transfers: dict[Place, float] = {}
        leads: dict[Place, float] = {}
        for stage, task in _tasks(other):
            place, bucket = (stage, task), other.buckets[task.microbatch]
            v = placement.virtual_stage(stage, task.chunk)
            durations[place] = self._task(TaskOf(v, task.kind, bucket), shares[v], draw)
            destination = placement.destination(stage, task)
            if destination is not None and destination[0] != stage:
                transfers[place] = self._message(_link(placement, stage, task, other.buckets), draw)
            if stage in self._samples.leads:
                leads[place] = median(self._samples.leads[stage])
        return TableCosts(durations, transfers), leads

    def _task(self, of: TaskOf, shares: Mapping[int, float], draw: random.Random) -> float:
        """What a task takes whose layers take such shares of what those of the run's virtual stages take."""
        found = self._samples.tasks.get(of)
        if found and shares == {of.virtual_stage: 1.0}:
            return draw.choice(found)
        if of.kind is INPUT and of.virtual_stage == 0:
            return 0.0  # nobody waits for the gradient of what is not computed
        kind = BACKWARD if of.kind is WEIGHT and of.virtual_stage == 0 else of.kind
        return sum(share * self._of(TaskOf(v, kind, of.bucket), draw) for v, share in shares.items())

    def _of(self, of: TaskOf, draw: random.Random) -> float:
        """What a task of one of the run's virtual stages takes, or would if its backward was split or
        fused."""
        found = self._samples.tasks.get(of, ())
        if found and (of.kind in (FORWARD, BACKWARD) or of.virtual_stage):
            return draw.choice(found)
        if of.kind is FORWARD:
            raise ValueError(f"the run had no microbatch of the bucket {of.bucket}")
        if of.kind is BACKWARD:
            halves = [self._samples.tasks.get(of._replace(kind=kind), ()) for kind in (INPUT, WEIGHT)]
            return sum(map(draw.choice, halves))
        whole = self._of(of._replace(kind=BACKWARD), draw)
        return whole * (self._input_share if of.kind is INPUT else 1 - self._input_share)

    @cached_property
    def _input_share(self) -> float:
        """What part of a backward its I takes; half if the run had none but fused ones."""
        sums = dict.fromkeys((INPUT, WEIGHT), 0.0)
        for of, found in self._samples.tasks.items():
            if of.kind in sums and of.virtual_stage:
                sums[of.kind] += sum(found)
        return sums[INPUT] / sum(sums.values()) if any(sums.values()) else 0.5

    def _message(self, of: Link, draw: random.Random) -> float:
        found = self._samples.messages.get(of) or self._samples.between.get(of.stages)
        if not found:
            raise ValueError(f"the run had no message between the stages {sorted(of.stages)}")
        return draw.choice(found)

    def _shares(self, other: RecordedStep) -> Sequence[Mapping[int, float]]:
        """By virtual stage of the other step: the run's, and what part of their time its layers take."""
        placement, there = self.steps[-1].rules.placement, other.rules.placement
        own, its = self.steps[-1].work(), other.work()
        if (own and own.split) == (its and its.split) and placement == there:
            return [{v: 1.0} for v in range(placement.last + 1)]
        if own is None or its is None or self.layers is None:
            raise ValueError("other layers on a stage: give steps that say what their layers have to do")
        slow = self.layers.shares.slowness
        found = []
        for v, layers in enumerate(its.ranges()):
            of: dict[int, float] = defaultdict(float)
            for i in layers:
                was = own.virtual_stage_of[i]
                speed = slow[there.place(v)[0]] / slow[placement.place(was)[0]]
                of[was] += self.layers.shares.of_time[i] * speed
            found.append(of)
        return found


def _tasks(step: RecordedStep) -> Iterator[Place]:
    rules = step.rules
    for stage in range(rules.placement.stages):
        scheduler = StageScheduler(stage, rules)
        for chunk in range(rules.placement.chunks):
            for j in range(rules.microbatches):
                backward = scheduler.task_for(BACKWARD.direction, chunk, j)
                yield stage, Task(FORWARD, chunk, j)
                yield stage, backward
                if backward.kind is INPUT:
                    yield stage, Task(WEIGHT, chunk, j)


def _awaited(trace: StepTrace) -> set[Place]:
    """The tasks whose messages found the device of the receiver idle.

    Where it computes, and its host has no core to itself, a message is noticed late, which costs nothing.
    """
    found = set()
    for stage in range(trace.stages):
        for last, record in pairwise(chain([None], trace.stage_records(stage))):
            assert record is not None
            sender = trace.sender(record)
            if sender is not None and (last is None or last.end <= record.ready):
                found.add((sender.stage, sender.task))
    return found


def _link(placement: Placement, stage: int, task: Task, buckets: Sequence[str]) -> Link:
    destination = placement.destination(stage, task)
    assert destination is not None, f"{task} of stage {stage} sends nothing"
    return Link(frozenset((stage, destination[0])), task.kind is FORWARD, buckets[task.microbatch])
