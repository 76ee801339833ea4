"""What happened: one record a task, and the figures that follow from the records.

Times are seconds on one clock. A record's `ready` is when the scheduler learned that the task could run,
`dispatched` when it was handed to the device, `start` and `end` when the device worked on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rrfp_jax.core.tasks import Task


class TaskRecord(NamedTuple):
    """One task of one stage, times in seconds; `bucket` numbers the microbatch's shapes."""

    stage: int
    task: Task
    bucket: int
    ready: float
    dispatched: float
    start: float
    end: float


class Gap(NamedTuple):
    """A time in which a stage's device did nothing; `awaited` is the task that ended it."""

    stage: int
    start: float
    end: float
    awaited: Task
    ready: float


@dataclass(frozen=True)
class StepTrace:
    """The records of one step of all stages, in order of their end."""

    step: int
    stages: int
    records: Sequence[TaskRecord]

    @property
    def start(self) -> float:
        """Dispatch of the first task (s)."""
        return min(record.dispatched for record in self.records)

    @property
    def end(self) -> float:
        """End of the last task (s)."""
        return max(record.end for record in self.records)

    @property
    def makespan(self) -> float:
        """From the first task's dispatch to the end of the last, over all stages (s)."""
        return self.end - self.start

    def stage_records(self, stage: int) -> list[TaskRecord]:
        """The records of one stage by start."""
        return sorted((r for r in self.records if r.stage == stage), key=lambda r: r.start)

    def order(self, stage: int) -> list[Task]:
        """The tasks of one stage as they were dispatched."""
        return [r.task for r in sorted(self.stage_records(stage), key=lambda r: r.dispatched)]

    def busy(self, stage: int) -> float:
        """Time in which the stage computed (s)."""
        return sum(r.end - r.start for r in self.records if r.stage == stage)

    def bubble(self) -> list[float]:
        """Per stage, the share of the makespan in which it did not compute."""
        span = self.makespan
        return [1.0 - self.busy(stage) / span if span > 0 else 0.0 for stage in range(self.stages)]

    def gaps(self, stage: int, shortest: float = 0.0) -> list[Gap]:
        """The stage's idle times longer than `shortest` seconds, from the step's start on."""
        gaps, idle_since = [], self.start
        for record in self.stage_records(stage):
            if record.start - idle_since > shortest:
                gaps.append(Gap(stage, idle_since, record.start, record.task, record.ready))
            idle_since = max(idle_since, record.end)
        return gaps
