"""A step that ran, with all that it takes to run it again in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rrfp_jax.core.measure.trace import StepTrace
from rrfp_jax.core.measure.work import Work
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.step_rules import Budget, StepRules


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
