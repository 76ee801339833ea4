"""Traces in Chrome's JSON format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each step has beside its tasks what it was decided by: rules, budgets, buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rrfp_jax.core.admission import Accumulation
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.schedules import NAMED, RANKED, Schedule, by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.json_files import Count, Seconds, write_json
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RecordedStep, StepTrace, TaskRecord

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


TRACED_STEPS = 20
"""How many of the latest steps are kept to be written."""

DELAY = "injected delay"
"""The name of the end of a task that is one."""

SHORTEST_GAP = 50e-6
"""Idle times below this (s) are left out of the file."""


def write_trace(
    path: str | Path, groups: Mapping[str, Iterable[RecordedStep]], clock: str = "rank 0"
) -> None:
    """One track per stage: tasks, the gaps between them with what was awaited, arrows for transfers.

    A task that was delayed on purpose has a slice for that within its own.

    Times in microseconds, on the clock of rank 0; `otherData` says how precisely the others' are known. Each
    group of steps has tracks of its own, under its name, and begins at 0.

    Raises:
        UsageError: the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    precision = 0.0
    for pid, (group, steps) in enumerate(groups.items()):
        listed = list(steps)
        events += [event | {"pid": pid} for event in _group(pid, group, listed)]
        precision = max([precision, *(part.precision for step in listed for part in step.trace.parts)])
    about = {"clock": clock, "clock_precision_us": _microseconds(precision)}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    write_json(path, trace)


def _group(pid: int, name: str, recorded: Sequence[RecordedStep]) -> list[dict[str, Any]]:
    """The events of some steps, but for the number of their group."""
    steps = [step.trace for step in recorded]
    origin = min((step.start for step in steps), default=0.0)
    placements = [asdict(step.placement) for step in steps[:1]]
    about = {"name": name, "placement": placements[0] if placements else None}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": about}]
    for stage in range(max((step.stages for step in steps), default=0)):
        title = {"name": f"stage {stage}"}
        events.append({"ph": "M", "name": "thread_name", "tid": stage, "args": title})
    events += _rules(recorded)
    for step in steps:
        events += _tasks(step, origin)
        events += _delays(step, origin)
        events += _gaps(step, origin)
        events += _arrows(step, origin, f"{pid}.{step.step}")
    return events


def _rules(steps: Sequence[RecordedStep]) -> list[dict[str, Any]]:
    """What each step was decided by; None for the same as the step before it."""
    events, last = [], None
    for step in steps:
        rules = rules_text(step)
        about = {"step": step.trace.step, "rules": None if rules == last else rules}
        if step.trace.busy_by_replica:
            busy = [[_microseconds(own) for own in row] for row in step.trace.busy_by_replica]
            about["replicas"] = {"shown": step.trace.replica, "busy": busy}
        events.append({"ph": "M", "name": "step_rules", "args": about})
        last = rules
    return events


def _tasks(step: StepTrace, origin: float) -> list[dict[str, Any]]:
    return [
        _event(
            str(record.task),
            record.stage,
            record.start - origin,
            record.end - record.start,
            {
                "kind": record.task.kind.letter,
                "stage": record.stage,
                "chunk": record.task.chunk,
                "microbatch": record.task.microbatch,
                "bucket": record.bucket,
                "step": step.step,
                "ready": _microseconds(record.ready - origin),
                "dispatched": _microseconds(record.dispatched - origin),
                **_injected(record),
                **({} if record.held is None else {"held": record.held}),
            },
        )
        for record in step.records
    ]


def _injected(record: TaskRecord) -> dict[str, float]:
    """What was injected, where something was."""
    found = {"delayed": record.delayed, "late": record.late}
    return {name: _microseconds(seconds) for name, seconds in found.items() if seconds}


def _delays(step: StepTrace, origin: float) -> list[dict[str, Any]]:
    """The ends of tasks that injected delays are."""
    return [
        _event(DELAY, r.stage, r.computed - origin, r.delayed, {"of": str(r.task), "step": step.step})
        for r in step.records
        if r.delayed
    ]


def _gaps(step: StepTrace, origin: float) -> list[dict[str, Any]]:
    return [
        _event(
            "idle",
            gap.stage,
            gap.start - origin,
            gap.end - gap.start,
            {"awaited": str(gap.awaited), "ready": _microseconds(gap.ready - origin), "step": step.step},
        )
        for stage in range(step.stages)
        for gap in step.gaps(stage, SHORTEST_GAP)
    ]


def _arrows(step: StepTrace, origin: float, mark: str) -> list[dict[str, Any]]:
    """From the end of every task to the task on another stage that its output made ready; named by a mark."""
    arrows = []
    for number, sender in enumerate(step.records):
        receiver = step.receiver(sender)
        if receiver is not None:
            same = {"name": "transfer", "cat": "transfer", "id": f"{mark}.{number}"}
            # An arrow belongs to the slice that it begins in: at its very end the next one may begin.
            leaves, comes = max(sender.start, sender.end - 1e-6) - origin, receiver.start - origin
            arrows.append({"ph": "s", "tid": sender.stage, "ts": _microseconds(leaves), **same})
            # An end before its beginning, by the clocks' imprecision, would not be drawn.
            comes = _microseconds(max(leaves, comes))
            arrows.append({"ph": "f", "bp": "e", "tid": receiver.stage, "ts": comes, **same})
    return arrows


def _event(name: str, stage: int, start: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": _microseconds(start), "dur": _microseconds(seconds)}
    return {"ph": "X", "name": name, "cat": "task", "tid": stage, **times, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
