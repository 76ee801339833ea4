"""How a Trainer makes its steps, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from rrfp_jax.core.accumulation import Accumulation
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.group.agreement import Terms

OnNonfinite: TypeAlias = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See `Trainer` for each of them.

    Raises:
        UsageError: one that cannot be, with its name and value.
    """

    max_in_flight: int | None
    accumulation: Accumulation
    spare_gradients: int
    clip_norm: float | None
    on_nonfinite: OnNonfinite
    terms: Terms = field(default_factory=Terms)

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "spare_gradients"):
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not whole and (name, value) != ("max_in_flight", None):
                raise UsageError(f"{name}={value!r}: give a whole number")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise UsageError(
                f"max_in_flight={self.max_in_flight}: a stage must be able to hold one microbatch"
            )
        if self.accumulation not in ("index", "arrival"):
            raise UsageError(f"accumulation={self.accumulation!r}: choose 'index' or 'arrival'")
        if self.spare_gradients < 0:
            raise UsageError(f"spare_gradients={self.spare_gradients}: must not be negative")
        clip = self.clip_norm
        if clip is not None and not _is_positive(clip):
            raise UsageError(f"clip_norm={clip!r}: give a number above 0; leave it out for no clipping")
        if self.on_nonfinite not in ("stop", "skip"):
            raise UsageError(f"on_nonfinite={self.on_nonfinite!r}: choose 'stop' or 'skip'")

    def limited(self, otherwise: int) -> Settings:
        """The same with a limit on the number of microbatches, if there is none."""
        return self if self.max_in_flight is not None else replace(self, max_in_flight=otherwise)

    def rules(
        self, placement: Placement, microbatches: int, schedule: Schedule, forward_only: bool
    ) -> StepRules:
        """The rules of a step."""
        return StepRules(
            placement=placement,
            microbatches=microbatches,
            schedule=schedule,
            limit=self.max_in_flight,
            accumulation=self.accumulation,
            spare_gradients=self.spare_gradients,
            forward_only=forward_only,
        )

    def as_text(self) -> dict[str, str]:
        """By name, for comparing them across processes."""
        return {item.name: str(getattr(self, item.name)) for item in fields(self)}


def checked_stall_seconds(given: Any) -> float:
    """A limit on standing still.

    Raises:
        UsageError: it is no number above 0.
    """
    if not _is_positive(given):
        raise UsageError(f"stall_seconds={given!r}: give a number of seconds above 0")
    return float(given)


def folder_of_executables(given: Any) -> Path | None:
    """Where compiled programs are kept, if anywhere.

    Raises:
        UsageError: it is no path.
    """
    if given is None:
        return None
    if not isinstance(given, (str, PathLike)) or not str(given):
        raise UsageError(
            f"executables={given!r}: give a folder to keep compiled programs in, such as "
            f"'runs/.executables', or None to compile at every start"
        )
    return Path(given)


def _is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return bool(number and value > 0)
