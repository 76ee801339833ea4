"""What a step was decided by, as plain data in a trace file: rules, budgets, buckets."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from rrfp_jax.core.admission import Accumulation
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.schedules import NAMED, RANKED, Schedule, by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.json_files import Count, Seconds
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RecordedStep, StepTrace

RECORDED = "recorded"
"""In the place of a schedule's name: one that has none, and is read as the order in which tasks ran."""


class _Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `Budget`."""

    costs: list[list[Count]]
    limit: Count
    most: Count | None


class _Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `LayerWork`."""

    name: str
    estimate: Seconds
    held_bytes: Count
    lasting_bytes: Count = 0


class _Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `Work`."""

    layers: list[_Layer]
    split: list[Annotated[int, msgspec.Meta(ge=1)]]

    def of(self, placement: Placement) -> Work:
        if len(self.split) != placement.last + 1 or sum(self.split) != len(self.layers):
            raise ValueError(f"{len(self.layers)} layers do not split into {self.split}")
        layers = [LayerWork(one.name, one.estimate, one.held_bytes, one.lasting_bytes) for one in self.layers]
        return Work(layers, self.split)


class RulesText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of a step beside its tasks; see `StepRules` and `RecordedStep`."""

    schedule: str
    microbatches: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    limit: Count | None
    backpressure: Literal["admission"]
    accumulation: Accumulation
    spare_gradients: Count
    forward_only: bool
    budgets: list[_Budget | None] | None
    buckets: list[str]
    grouped: bool
    lead: Seconds
    work: _Work | None = None

    def step(self, trace: StepTrace) -> RecordedStep:
        """The step of this trace.

        Raises:
            ValueError: they do not belong together.
        """
        stages, chunks, microbatches = trace.stages, trace.placement.chunks, self.microbatches
        if len(self.buckets) != microbatches:
            raise ValueError(f"{len(self.buckets)} buckets for {microbatches} microbatches")
        if max(record.task.microbatch for record in trace.records) >= microbatches:
            raise ValueError(f"step {trace.step} has tasks of more than {microbatches} microbatches")
        budgets: list[Budget | None] | None = None
        if self.budgets is not None:
            budgets = [_budget(one, chunks, microbatches) for one in self.budgets]
            if len(budgets) != stages:
                raise ValueError(f"{len(budgets)} budgets for {stages} stages")
        rules = StepRules(
            placement=trace.placement,
            microbatches=microbatches,
            schedule=self._schedule(trace),
            limit=self.limit,
            accumulation=self.accumulation,
            spare_gradients=self.spare_gradients,
            forward_only=self.forward_only,
        )
        return RecordedStep(
            trace=trace,
            rules=rules,
            budgets=budgets,
            buckets=self.buckets,
            grouped=self.grouped,
            lead=self.lead,
            work=partial(_same, None if self.work is None else self.work.of(trace.placement)),
        )

    def _schedule(self, trace: StepTrace) -> Schedule:
        if self.schedule != RECORDED:
            return by_name(self.schedule)
        rows = tuple(tuple(trace.order(stage)) for stage in range(trace.stages))
        return ListedOrder(trace.placement, self.microbatches, rows)


def rules_text(step: RecordedStep) -> dict[str, Any]:
    """A step but for its tasks, as `RulesText` reads it."""
    rules, name = step.rules, step.rules.name
    known = name.removeprefix(RANKED) in NAMED
    return {
        "schedule": name if known else RECORDED,
        "microbatches": rules.microbatches,
        "limit": rules.limit,
        "backpressure": "admission",
        "accumulation": rules.accumulation,
        "spare_gradients": rules.spare_gradients,
        "forward_only": rules.forward_only,
        "budgets": step.budgets and [budget and asdict(budget) for budget in step.budgets],
        "buckets": list(step.buckets),
        "grouped": step.grouped,
        "lead": step.lead,
        "work": _work_text(step.work()),
    }


def _work_text(work: Work | None) -> dict[str, Any] | None:
    if work is None:
        return None
    return {"layers": [layer._asdict() for layer in work.layers], "split": list(work.split)}


def _same(work: Work | None) -> Work | None:
    return work


def _budget(given: _Budget | None, chunks: int, microbatches: int) -> Budget | None:
    if given is None:
        return None
    if [len(row) for row in given.costs] != [microbatches] * chunks:
        raise ValueError(f"a budget has no costs of {chunks} chunks and {microbatches} microbatches")
    return Budget(given.costs, given.limit, given.most)
