"""How a Trainer makes its steps: groups of settings, of which each checks itself, once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from rrfp_jax.core.accumulation import Accumulation
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import StepRules, default_max_in_flight
from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_numbers
from rrfp_jax.runtime.engine.settings import Execution, MemoryPolicy, is_positive, is_whole
from rrfp_jax.train.loss_scale import LossScale, loss_scale_of

OnNonfinite: TypeAlias = Literal["stop", "skip"]

Rebalance: TypeAlias = Literal["off", "suggest", "auto"]


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a step computes, to the bit.

    Attributes:
        accumulation: "index" adds gradients in microbatch order, so results are equal to the bit whatever the
            order of tasks; "arrival" adds them as they come.
        equal_schedules: run every backward as the same two programs, one right after the other where the
            schedule has it whole, so that all schedules of a placement give equal bits; see `docs/numbers.md`
            for what it costs.
        clip_norm: scale the gradient down to this norm, taken over all stages; None for no clipping.
        on_nonfinite: what to do with a step whose loss or gradient is not finite: "stop" with a
            TrainingError, or "skip" its update, up to 20 times in a row.
        loss_scale: what the loss is multiplied by before it is differentiated, for models that compute in
            float16: a number, or "dynamic", which finds one by skipping steps; None for 1.
        seed: of initial values and random keys.

    Raises:
        UsageError: one that cannot be, with its name and value.
    """

    accumulation: Accumulation = "index"
    equal_schedules: bool = False
    clip_norm: float | None = None
    on_nonfinite: OnNonfinite = "stop"
    loss_scale: str | float | LossScale | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.accumulation not in ("index", "arrival"):
            raise UsageError(f"accumulation={self.accumulation!r}: choose 'index' or 'arrival'")
        if not isinstance(self.equal_schedules, bool):
            raise UsageError(f"equal_schedules={self.equal_schedules!r}: give True or False")
        if self.equal_schedules and self.accumulation != "index":
            raise UsageError(
                f"equal_schedules=True with accumulation={self.accumulation!r}: gradients that are added as "
                f"they come are not equal to the bit; leave accumulation at 'index'"
            )
        if self.clip_norm is not None and not is_positive(self.clip_norm):
            raise UsageError(
                f"clip_norm={self.clip_norm!r}: give a number above 0; leave it out for no clipping"
            )
        if self.on_nonfinite not in ("stop", "skip"):
            raise UsageError(f"on_nonfinite={self.on_nonfinite!r}: choose 'stop' or 'skip'")
        loss_scale_of(self.loss_scale)
        if not is_whole(self.seed) or not 0 <= self.seed < 2**32:
            raise UsageError(f"seed={self.seed!r}: give a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a Trainer.

    Attributes:
        numerics, memory, execution: in groups.
        rebalance: whether layers move to other stages where measured costs are for it (`docs/rebalance.md`):
            "off"; "suggest" says which would, and what it would save; "auto" moves them.

    Raises:
        UsageError: no such `rebalance`.
    """

    numerics: Numerics = field(default_factory=Numerics)
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    execution: Execution = field(default_factory=Execution)
    rebalance: Rebalance = "off"

    def __post_init__(self) -> None:
        if self.rebalance not in ("off", "suggest", "auto"):
            raise UsageError(f"rebalance={self.rebalance!r}: choose 'off', 'suggest' or 'auto'")

    def limited(self, stages: int) -> Settings:
        """The same with the usual limit on the number of microbatches in flight, if there is none."""
        if self.memory.max_in_flight is not None:
            return self
        return replace(self, memory=replace(self.memory, max_in_flight=default_max_in_flight(stages)))

    def rules(
        self, placement: Placement, microbatches: int, schedule: Schedule, forward_only: bool = False
    ) -> StepRules:
        """The rules of a step."""
        return StepRules(
            placement=placement,
            microbatches=microbatches,
            schedule=schedule,
            limit=self.memory.max_in_flight,
            accumulation=self.numerics.accumulation,
            spare_gradients=self.memory.spare_gradients,
            forward_only=forward_only,
        )

    def as_text(self) -> dict[str, str]:
        """What must be equal in all processes, by the names that users type."""
        agreed = asdict(self.numerics) | asdict(self.memory) | asdict(self.execution.terms)
        agreed |= {"transport": self.execution.transport, "rebalance": self.rebalance}
        return {name: str(value) for name, value in agreed.items()}

    def flat(self) -> dict[str, Any]:
        """Every setting by the name that users type, as keyword arguments of a Trainer."""
        execution = shallow(self.execution)
        terms = shallow(execution.pop("terms"))
        own = {"rebalance": self.rebalance}
        return shallow(self.numerics) | shallow(self.memory) | terms | execution | own


def shallow(group: Any) -> dict[str, Any]:
    """The fields of a dataclass by name; what is in them is left as it is."""
    return {item.name: getattr(group, item.name) for item in fields(group)}
