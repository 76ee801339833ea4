"""A step that ran, with all that it takes to run it again in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from rrfp_jax.core.measure.costs import TableCosts
from rrfp_jax.core.measure.trace import StepTrace
from rrfp_jax.core.measure.work import Work
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Task


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step that ran, and what it was decided by.

    Attributes:
        trace: what happened.
        rules: of the step.
        budgets: in bytes, by stage; None for none.
        buckets: the names of the microbatches' buckets.
        grouped: whether several processes shared a stage.
        lead: how long before a task's end the next one was queued (s).
        work: what the model's layers have to do, found out when somebody asks; None if that is not known.
    """

    trace: StepTrace
    rules: StepRules
    budgets: Sequence[Budget | None] | None = None
    buckets: Sequence[str]
    grouped: bool = False
    lead: float = 0.0
    work: Callable[[], Work | None] = field(default=lambda: None, compare=False, repr=False)

    @property
    def fixed_order(self) -> bool:
        """Whether its schedule was one, or a hint."""
        return isinstance(self.rules.schedule, FixedOrder)


def replayed_costs(trace: StepTrace) -> TableCosts:
    """The costs of a step, with the host's time in them, so that their replay takes as long as the step.

    What passed between an arrival and the task's beginning, while the device was free, counts to the
    transfer; between two tasks that were both ready, to the later one.
    """
    durations: dict[tuple[int, Task], float] = {}
    transfers: dict[tuple[int, Task], float] = {}
    for stage in range(trace.stages):
        records = trace.stage_records(stage)
        for last, record in pairwise(chain([None], records)):
            assert record is not None
            free = trace.start if last is None else last.end
            sender = trace.sender(record)
            arrived_late = sender is not None and record.ready > free
            began = record.start if last is None or arrived_late else last.end
            durations[stage, record.task] = record.end - began
            if sender is not None and sender.stage != stage:
                there = record.start if arrived_late else record.ready
                transfers[sender.stage, sender.task] = max(0.0, there - sender.end)
    return TableCosts(durations, transfers)
