"""When a run saves itself, and from where it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.errors import UsageError
from rrfp_jax.train.checkpoint import OnError
from rrfp_jax.train.report import Report
from rrfp_jax.train.trainer import Trainer


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


class Saver:
    """Saves a Trainer as it goes along: at its intervals, at the end, and when it is asked to stop.

    Args:
        trainer: of this process.
        settings: of the run.
        folder: of the checkpoints.
        config: of the run as plain data, to keep with them.
        say: tells what is done, on rank 0.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Checkpointing,
        folder: Path,
        config: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._settings, self._folder = trainer, settings, folder
        self._config, self._say = config, say
        self._saved_at: float | None = None  # on rank 0's clock, as the trace has it

    def resume(self) -> int:
        """Go on from the latest checkpoint, if that is wanted and there is one; the steps that are done."""
        if self._settings.wanted and self._settings.resume and self._trainer.restore(self._folder):
            done = self._trainer.steps_done
            self._say(f"resumes after {done} steps from {self._folder}/{done}")
        return self._trainer.steps_done

    def after_step(self, report: Report, *, ends: bool) -> bool:
        """Save if it is time; whether that was done.

        Args:
            report: of the step, equal on all processes, so that all decide alike.
            ends: whether no step follows; then it is waited for.
        """
        if not self._settings.wanted:
            return False
        now = max(part.end for part in report.trace.parts)
        if self._saved_at is None:
            self._saved_at = now
        every_steps, every_seconds = self._settings.every_steps, 60 * self._settings.every_minutes
        due = every_steps > 0 and (report.step + 1) % every_steps == 0
        due |= every_seconds > 0 and now - self._saved_at >= every_seconds
        if not (due or ends):
            return False
        self._saved_at = now
        self._trainer.save(
            self._folder,
            keep=self._settings.keep,
            on_error=self._settings.on_error,
            wait=ends,
            config=self._config,
        )
        return True
