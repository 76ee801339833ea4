"""How often a run saves itself."""

from __future__ import annotations

from dataclasses import dataclass

from rrfp_jax.checkpoint.checkpoint import OnError
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """A run's checkpoints, in `<directory>/<name>.checkpoints/`. Without an interval there are none.

    Attributes:
        every_steps: steps between two; 0 for no such interval.
        every_minutes: minutes between two, whichever comes first; 0 for no such interval.
        keep: how many are kept.
        on_error: if one cannot be written, "continue" with a line about it, or "stop".
        resume: go on from the latest one; if not, those that there are are moved away.

    Raises:
        UsageError: a negative interval, nothing to keep, or an unknown `on_error`.
    """

    every_steps: int = 0
    every_minutes: float = 0.0
    keep: int = 3
    on_error: OnError = "continue"
    resume: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every_steps < 0 or not self.every_minutes >= 0:
            raise UsageError(
                f"checkpoint.every_steps={self.every_steps}, every_minutes={self.every_minutes}: give an "
                f"interval, or 0 for none"
            )
        if self.keep < 1:
            raise UsageError(f"checkpoint.keep={self.keep}: at least one must be kept")
        if self.on_error not in ("continue", "stop"):
            raise UsageError(f"checkpoint.on_error={self.on_error!r}: choose 'continue' or 'stop'")

    @property
    def wanted(self) -> bool:
        """Whether there are any."""
        return self.every_steps > 0 or self.every_minutes > 0
