"""A step of a model that is cut otherwise: which cuts to try, and what the step's tasks would take then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rrfp_jax.core.cuts import least_largest
from rrfp_jax.core.measure.costs import Costs, TableCosts
from rrfp_jax.core.measure.recorded_step import RecordedStep
from rrfp_jax.core.measure.work import LayerShares, Work, busy_seconds, layer_shares
from rrfp_jax.core.step_rules import Budget
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task


class Recut(NamedTuple):
    """Another split.

    Attributes:
        change: in words.
        moved: the layer that moves; None if several may.
        split: numbers of layers, by virtual stage.
    """

    change: str
    moved: int | None
    split: tuple[int, ...]


@dataclass(frozen=True)
class Layers:
    """A model's layers with what they take, found from steps that ran.

    Attributes:
        work: of the layers.
        shares: of what their virtual stages take.
        placement: of the virtual stages.
    """

    work: Work
    shares: LayerShares
    placement: Placement

    @classmethod
    def of(cls, steps: Sequence[RecordedStep]) -> Layers | None:
        """From the steps that ran as the last one did; None if it is not known what layers have to do."""
        work, placement = steps[-1].work(), steps[-1].rules.placement
        if work is None:
            return None
        busy = busy_seconds([step.trace for step in steps if step.rules.placement == placement])
        return cls(work, layer_shares(work, busy, placement), placement)

    def recuts(self) -> Iterator[Recut]:
        """The split whose slowest virtual stage takes least, and the slowest one's ends moved."""
        stage_of = [self.placement.place(v)[0] for v in range(self.placement.last + 1)]

        def seconds(v: int, first: int, end: int) -> float:
            return sum(self.shares.seconds[first:end]) * self.shares.slowness[stage_of[v]]

        ranges = self.work.ranges()
        slowest = max(range(len(ranges)), key=lambda v: seconds(v, ranges[v].start, ranges[v].stop))
        moves = list(self._moves(slowest))
        _, best = least_largest(seconds, len(self.work.layers), len(ranges))
        if tuple(best) not in (tuple(self.work.split), *(move.split for move in moves)):
            yield Recut(f"split {_text(best)} instead of {_text(self.work.split)}", None, tuple(best))
        yield from moves

    def _moves(self, of: int) -> Iterator[Recut]:
        """The first layer of a virtual stage on the one before it, and the last on the one after it."""
        ranges = self.work.ranges()
        if len(ranges[of]) < 2:
            return
        for to, layer in ((of - 1, ranges[of].start), (of + 1, ranges[of].stop - 1)):
            if not 0 <= to < len(ranges):
                continue
            there, here = self.placement.place(to)[0], self.placement.place(of)[0]
            if there != here:  # as they are where a V turns
                split = tuple(len(r) - (v == of) + (v == to) for v, r in enumerate(ranges))
                name = self.work.layers[layer].name
                yield Recut(f"layer {layer} ({name}) on stage {there} instead of {here}", layer, split)

    def recut(
        self, step: RecordedStep, costs: TableCosts, split: Sequence[int]
    ) -> tuple[Costs, RecordedStep]:
        """The step's costs and its budgets with another split of the same layers."""
        ranges = self.work.ranges(split)
        durations = {
            (stage, task): self._seconds(
                costs, stage, task, ranges[self.placement.virtual_stage(stage, task.chunk)]
            )
            for stage, task in costs.durations
        }
        budgets = step.budgets and [
            budget and self._budget(step.budgets, stage, budget, ranges)
            for stage, budget in enumerate(step.budgets)
        ]
        return replace(costs, durations=durations), replace(step, budgets=budgets)

    def _seconds(self, costs: TableCosts, stage: int, task: Task, layers: range) -> float:
        """Of a task that has these layers."""
        found = 0.0
        for i in layers:
            was, chunk = self.placement.place(self.work.virtual_stage_of[i])
            speed = self.shares.slowness[stage] / self.shares.slowness[was]
            found += self.shares.of_time[i] * speed * _duration(costs, was, task._replace(chunk=chunk))
        return found

    def _budget(
        self, budgets: Sequence[Budget | None], stage: int, budget: Budget, ranges: Sequence[range]
    ) -> Budget:
        """Of a stage whose chunks have these layers: other charges, and what their weights leave."""
        charges, room = [], budget.limit
        for chunk in range(self.placement.chunks):
            v = self.placement.virtual_stage(stage, chunk)
            room += self._lasting(self.work.ranges()[v]) - self._lasting(ranges[v])
            row = [0.0] * len(budget.costs[chunk])
            for i in ranges[v]:
                was, its_chunk = self.placement.place(self.work.virtual_stage_of[i])
                charged = budgets[was] or budget
                for j, own in enumerate(charged.costs[its_chunk]):
                    row[j] += own * self.shares.of_bytes[i]
            charges.append([round(own) for own in row])
        return replace(budget, costs=charges, limit=room)

    def _lasting(self, layers: range) -> int:
        return sum(self.work.layers[i].lasting_bytes for i in layers)


def _duration(costs: TableCosts, stage: int, task: Task) -> float:
    """Of a task that may run in other halves there: a first virtual stage has no I, a fused B is both."""
    if (stage, task) in costs.durations or task.kind is FORWARD:
        return costs.durations.get((stage, task), 0.0)
    if task.kind in (INPUT, WEIGHT):
        return costs.durations.get((stage, task._replace(kind=BACKWARD)), 0.0) / 2
    return sum(costs.durations.get((stage, task._replace(kind=kind)), 0.0) for kind in (INPUT, WEIGHT))


def _text(split: Sequence[int]) -> str:
    return ",".join(map(str, split))
