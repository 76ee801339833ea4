"""The steps of a run, and what follows each of them: validation, its line, the user's methods, saving."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rrfp_jax.errors import TrainingError
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runs.display import Display
from rrfp_jax.runs.files import RunFiles
from rrfp_jax.runs.saving import Saver
from rrfp_jax.runtime.run.host_memory import HostMemory
from rrfp_jax.runtime.run.signals import StopReason
from rrfp_jax.runtime.run.world import World
from rrfp_jax.train.report import VALIDATION, Evaluation, Report
from rrfp_jax.train.trainer import Trainer
from rrfp_jax.user_code import called


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A step and what has followed it.

    Attributes:
        report: of the step.
        validation: after it, if there was one.
        ends: it was the run's last.
        stops: the run stops here, because a signal came or lost ranks are replaced, and can go on later.
    """

    report: Report
    validation: Evaluation | None
    ends: bool
    stops: bool


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Trains a run; all its processes do so together.

    Attributes:
        config, world: of the run.
        trainer: that makes the steps.
        validation: its data; None for none.
        saver, files, display: told of every step.
        memory: of the host, whose launcher may ask for it back; None if none was lent.
    """

    config: RunConfig
    world: World
    trainer: Trainer
    validation: Any
    saver: Saver
    files: RunFiles
    display: Display
    memory: HostMemory | None = None

    def run(self) -> Followed:
        """Train until a step ends the run or it stops; that step. There must be one left."""
        for report in self.trainer.steps(self.config.steps - self.trainer.steps_done):
            followed = self._follow(report)
            if followed.ends or followed.stops:
                return followed
        raise AssertionError("the last step ends the run")

    def _follow(self, report: Report) -> Followed:
        ends = self._wants_end("on_step", report) or report.step == self.config.steps - 1
        found = None
        try:
            if self._is_due(report, ends):
                found = self._validated(ends)
        finally:  # a step's line is written even if its validation is broken off
            self.files.add(report, report.as_dict() | _line_of(found))
        self.display.show(report, found)
        if found is not None:
            ends |= self._wants_end("on_validation", report, found)
        stops = self._is_stopped and not ends
        hands_over = stops and self.world.stop.agreed is StopReason.HANDS_OVER
        self.saver.after_step(report, ends=ends or (stops and not hands_over))
        if hands_over:
            stops = self._hands_over()
        elif self.memory is not None and self.memory.is_asked_for:
            self.world.stop.request(StopReason.HANDS_OVER)  # which all know at the end of the next step
        return Followed(report=report, validation=found, ends=ends, stops=stops)

    def _hands_over(self) -> bool:
        """Whether it stops here: its state must be somewhere to go on from. A signal may have come, too."""
        if (self._is_pressed or not self.saver.keeps) and not self.saver.rescue():
            return self._is_pressed
        self.trainer.finish_saving()
        return True

    @property
    def _is_stopped(self) -> bool:
        return self.world.stop.agreed > StopReason.ASKED

    @property
    def _is_pressed(self) -> bool:
        """Whether it stops because a signal came, and validates no more."""
        return self.world.stop.agreed > StopReason.HANDS_OVER

    def _is_due(self, report: Report, ends: bool) -> bool:
        every = self.config.validate_every
        due = ends or (every > 0 and (report.step + 1) % every == 0)
        return due and self.validation is not None and (ends or not self._is_pressed)

    def _validated(self, ends: bool) -> Evaluation | None:
        """The validation; None if the run stops during it. The one at the end is always finished."""
        found, count = [], self.config.validation_steps or None
        with closing(self.trainer._evaluating(self.validation, count)) as steps:
            for sums in steps:
                found.append(sums)
                if self._is_pressed and not ends:
                    return None
        return Evaluation.of(found)

    def _wants_end(self, name: str, *about: Any) -> bool:
        """Call a method of the config; whether the run is to end here, as all processes then know.

        Raises:
            TrainingError: it raised something, with its traceback.
        """
        if getattr(type(self.config), name) is getattr(RunConfig, name):
            return False  # nobody need be asked
        with called(f"{type(self.config).__name__}.{name}()", TrainingError):
            wants = bool(getattr(self.config, name)(*about))
        if wants:
            self.world.stop.request(StopReason.ASKED)
        told = self.world.gather(f"whether {name} ends the run", wants)
        return any(told) and not self._is_pressed


def _line_of(found: Evaluation | None) -> dict[str, float | None]:
    """What a step's line of `metrics.jsonl` tells of the validation that followed it."""
    if found is None:
        return {}
    figures = {"loss": found.loss, **found.metrics}
    return {f"{VALIDATION}{name}": value if math.isfinite(value) else None for name, value in figures.items()}
