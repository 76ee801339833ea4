"""What a run answers to Ctrl-C and SIGTERM, at each stage of its life, and how it is gone on with."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, HANDED_OVER, INTERRUPTED
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runs.display import Display
from rrfp_jax.runs.saving import started_again
from rrfp_jax.runtime.run.exits import fail
from rrfp_jax.runtime.run.host_memory import FOLDER
from rrfp_jax.runtime.run.place import NAME, typed_command, without_flag
from rrfp_jax.runtime.run.signals import EndsAtOnce, StopReason, StopsAfterStep, save_seconds
from rrfp_jax.runtime.run.world import World

RESUME = "--config.checkpoint.resume"


def checkpoints_of(config: RunConfig) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.directory) / f"{config.name}.checkpoints"


class Stopping:
    """What is said, by rank 0 or by whoever has a terminal of its own, when a run is asked to stop.

    Args:
        config: of the run.
        world: its processes.
        display: shows what is said.
    """

    def __init__(self, config: RunConfig, world: World, display: Display) -> None:
        self._config, self._world, self._display = config, world, display
        self._folder = checkpoints_of(config)

    def at_start(self) -> EndsAtOnce:
        """The answer before the first step, when a rank has nothing to save."""
        return EndsAtOnce(self._say_start, self._end)

    def in_steps(self, done: Callable[[], int]) -> StopsAfterStep:
        """The answer from the first step to the end of the run.

        Args:
            done: tells how many steps have been trained.

        Raises:
            UsageError: RRFP_SAVE_SECONDS is nonsense.
        """

        def say(why: StopReason, at_once: bool) -> None:
            self._say_again(why) if at_once else self._say_answer(why, done())

        return StopsAfterStep(self._world, save_seconds(ENVIRONMENT), say, leave=self._display.close)

    def say_end(self, step: int, saved: bool) -> int:
        """Say after which step the run has stopped, and how to go on; the exit status that goes with it.

        Args:
            step: the last one.
            saved: whether there is a checkpoint of it.
        """
        why, latest = self._world.stop.agreed, self._latest()
        if why is StopReason.HANDS_OVER:
            self._display.say(f"stopped after step {step}, as lost ranks are replaced")
            return HANDED_OVER
        if latest is None:
            self._display.say(f"{why}: stopped after step {step}; nothing is saved")
            return INTERRUPTED
        which = "" if saved else ", which could not be saved"
        self._display.say(f"{why}: stopped after step {step}{which}; resumes from {latest}\n{self._how()}")
        return INTERRUPTED if why is StopReason.CTRL_C or not saved else DONE

    def _say_start(self) -> None:
        latest = self._latest()
        lost = "nothing was trained yet" if latest is None else f"nothing is lost; resumes from {latest}"
        if ENVIRONMENT.get(FOLDER) and started_again():
            lost = "what only the host's memory has is lost, as the run saves no checkpoints"
            if self._config.checkpoint.wanted:
                lost = "the launcher saves next what only the host's memory has"
        self._say(f"Ctrl-C while starting: ends; {lost}\n{self._how()}")

    def _say_again(self, why: StopReason) -> None:
        latest = self._latest()
        lost = "nothing is saved" if latest is None else f"resumes from {latest}\n{self._how()}"
        self._say(f"{why} again: ends at once; {lost}")

    def _say_answer(self, why: StopReason, done: int) -> None:
        what = "stops after this step and saves nothing, as no interval is set"
        if done >= self._config.steps:
            what = "all steps have been trained: validates, saves and ends"
        elif self._config.checkpoint.wanted:
            what = "stops after this step and saves itself"
        self._say(f"{why}: {what}; a second one ends it at once")

    def _say(self, text: str) -> None:
        if self._world.rank == 0 or self._world.folder is None:
            self._display.say(text)

    def _latest(self) -> Path | None:
        """The latest checkpoint."""
        steps = CheckpointFolder(self._folder).steps() if self._config.checkpoint.wanted else []
        return self._folder / str(steps[-1]) if steps else None

    def _how(self) -> str:
        """The command that goes on with the run, in words."""
        if self._world.size > 1 and NAME not in ENVIRONMENT:
            return "to go on: start all ranks again as before"
        command = without_flag(typed_command(), RESUME)
        if not self._config.checkpoint.resume and self._latest() is not None:
            command += f" {shlex.quote(RESUME)}=True"
        return f"to go on: {command}"

    def _end(self) -> None:
        self._display.close()
        fail(self._world, KeyboardInterrupt())
