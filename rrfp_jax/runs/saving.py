"""When a run saves itself, and from which checkpoint it goes on.

Where its launcher has lent it a folder in the host's memory, the state of every step is kept there, too. The
folder has no other run's states, so what is in it is gone on from.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.saving import NoneIntact
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.files import move_away, read_whole
from rrfp_jax.printing import Say
from rrfp_jax.runs.config import Checkpointing, differences
from rrfp_jax.runs.lent_folder import outlives_launcher
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.run.host_memory import HostMemory
from rrfp_jax.train.report import Report
from rrfp_jax.train.trainer import Trainer

BEGAN = ".began-anew"
"""A file that tells that the checkpoints of runs before were moved away, and by which job: in a launcher's
folder or, without a launcher, among the run's own checkpoints."""

JOB, LONGEST_JOB = "SLURM_JOB_ID", 100


class Saver:
    """Saves a Trainer as it goes along: at its intervals, and where it ends or stops.

    Attributes:
        keeps: whether the state of the latest step is in the host's memory, equal on all processes.
        saved: whether the latest checkpoint that was waited for has been written, equal on all processes.
    """

    def __init__(
        self, trainer: Trainer, settings: Checkpointing, folder: Path, say: Say, memory: HostMemory | None
    ) -> None:
        self._trainer, self._world, self._say = trainer, trainer._world, say
        self._settings, self._folder = settings, folder
        self._memory, self.keeps, self.saved = memory, False, False
        held = CheckpointFolder(memory.states).steps() if memory is not None else []
        stored = CheckpointFolder(folder).steps() if settings.wanted else []
        is_latest = bool(held) and held[-1] >= max(stored, default=0)
        self._held = memory.states if memory is not None and is_latest else None  # goes on from there
        self._wants_stored = settings.wanted and (settings.resume or self._began_before())
        self._config: Mapping[str, Any] = {}
        self._saved_at: float | None = None  # on rank 0's clock, as the trace has it

    def look_ahead(self, config: Mapping[str, Any]) -> int:
        """Tell what has changed since the checkpoint that the run will go on from; nothing is compiled yet.

        The result is how many steps that has; 0 if there is none.
        """
        self._config = config
        if self._settings.wanted:
            self._trainer._stepper.saves.require_shared(self._folder)
        resumes = self._held is not None or self._wants_stored
        found = self._trainer._check_resume(self._source) if resumes else None
        if found is None:
            return 0
        if found.config is not None and (changed := differences(found.config, config)):
            self._say("\n  ".join(["changed since the checkpoint that is there:", *changed]))
        if found.refusal:
            raise UsageError(
                f"{found.refusal}. To begin anew, which keeps that one: --config.checkpoint.resume=False"
            )
        return found.steps

    def resume(self) -> int:
        """Go on from the host's memory, or from the latest checkpoint if that is wanted; the steps done."""
        if self._held is not None:
            if self._world.rank == 0:  # whoever was killed was perhaps saving
                for folder in (self._source, self._folder):
                    CheckpointFolder(folder).tidy()
            if self._went_on():
                return self._trainer.steps_done
            self._say("the host's memory has no intact state: resumes from the latest checkpoint, if any")
            if self._world.rank == 0:
                shutil.rmtree(self._held, ignore_errors=True)
            self._held = None
        if self._wants_stored:
            self._went_on()
        elif self._settings.wanted:
            self._begin_anew()
        return self._trainer.steps_done

    def _went_on(self) -> bool:
        """Go on from the source, if it has a checkpoint; whether it has."""
        try:
            found = self._trainer._resume(self._source)
        except NoneIntact:
            if self._held is None:
                raise
            found = False
        if found:
            done = self._trainer.steps_done
            where = self._folder / str(done) if self._held is None else "the host's memory"
            self._say(f"resumes after {done} steps, from {where}")
        return found

    def _begin_anew(self) -> None:
        """Move earlier checkpoints away; once only, as those that follow are this run's own."""
        if self._world.rank == 0:
            if self._folder.exists() and {*os.listdir(self._folder)} - {BEGAN}:
                self._say(f"earlier checkpoints are kept as {move_away(self._folder)}")
            mark = self._mark
            try:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.write_text(ENVIRONMENT.get(JOB, ""), encoding="utf-8")
            except OSError as error:
                self._say(
                    f"{mark}: cannot be written ({error.strerror}): a requeued run would begin anew again"
                )
        self._world.gather("earlier checkpoints to be moved away", None)

    @property
    def _mark(self) -> Path:
        return (self._world.folder or self._folder) / BEGAN

    def _began_before(self) -> bool:
        """Whether an earlier attempt at this run has come so far that the checkpoints there are its own."""
        try:
            job = read_whole(self._mark, LONGEST_JOB).decode(errors="replace")
        except OSError:
            return False
        return self._world.folder is not None or (started_again() and job == ENVIRONMENT.get(JOB, ""))

    @property
    def _source(self) -> Path:
        """The folder that the run goes on from."""
        return self._held or self._folder

    def after_step(self, report: Report, *, ends: bool) -> None:
        """Keep the state in the host's memory if steps follow, and save if it is time."""
        if self._memory is not None and not ends:  # else who dies now would leave nothing to be saved
            with suppress(OSError):  # which `hold` says
                self._memory.make()
            self.keeps = self._trainer._hold(self._memory.states, self._config)
        if not self._settings.wanted:
            return
        now = max(part.end for part in report.trace.parts)
        if self._saved_at is None:
            self._saved_at = now
        every_steps, every_seconds = self._settings.every_steps, 60 * self._settings.every_minutes
        due = every_steps > 0 and (report.step + 1) % every_steps == 0
        due |= every_seconds > 0 and now - self._saved_at >= every_seconds
        if due or ends:
            self._saved_at = now
            self._save(wait=ends)

    def rescue(self) -> bool:
        """Save the latest step now, and wait for that, if that is wanted; whether it has been saved."""
        if self._settings.wanted:
            self._save(wait=True)
        return self.saved

    def _save(self, wait: bool) -> None:
        keep, on_error = self._settings.keep, self._settings.on_error
        self._trainer.save(self._folder, keep=keep, on_error=on_error, wait=False, config=self._config)
        self.saved = wait and self._trainer.finish_saving()


def started_again() -> bool:
    """Whether a launcher has started this process again after a failure."""
    return ENVIRONMENT.get("RRFP_RESTARTS", "0") != "0"


def ranks_of_replicas(mesh: Mesh, processes: int) -> Mapping[int, int]:
    """By number of replicas, of how many processes, each with as many devices as one of the whole run has.

    The numbers divide the mesh's: then replicas can share a step's microbatches whenever all of them can.
    """
    share, found = mesh.devices // processes, {}
    for replicas in (number for number in range(1, mesh.dp + 1) if mesh.dp % number == 0):
        fewer = replace(mesh, dp=replicas)
        if fewer.devices % share == 0:
            with suppress(UsageError):  # so many processes cannot share the devices
                fewer.groups(ranks := fewer.devices // share)
                found[replicas] = ranks
    return found


def save_latest(memory: HostMemory, checkpoints: Path | None, status: int, say: Say) -> bool:
    """Copy the latest state to the run's checkpoints if it is later than all of them; whether they have it.

    It stays in memory, in a folder of its own, until it has been copied, also if the launcher is killed.
    """
    steps = CheckpointFolder(memory.states).steps()
    stored = CheckpointFolder(checkpoints).steps() if checkpoints is not None else []
    if not steps:
        return False
    if steps[-1] <= max(stored, default=-1):
        return True
    latest = f"the state after {steps[-1]} steps, which only the host's memory has"
    if checkpoints is None:
        if status != DONE:
            say(f"{latest}, is lost, as the run saves none: --config.checkpoint.every_steps=N has it saved")
        return False
    say(f"saves {latest}, as {checkpoints / str(steps[-1])}")
    try:
        kept = outlives_launcher(memory)
    except OSError as error:
        say(f"it is lost: {memory.folder}: {error.strerror}")
        return False
    try:
        CheckpointFolder(checkpoints).import_checkpoint(CheckpointFolder(kept.states).final(steps[-1]))
    except OSError as error:
        paths = checkpoints, kept.folder, kept.states / str(steps[-1])
        folder, left, state = (shlex.quote(str(path)) for path in paths)
        place = error.filename2 or error.filename or checkpoints
        say(
            f"it cannot be saved: {place}: {error.strerror}; it stays in memory, in {kept.folder}, as long "
            f"as this machine runs. To keep it, see to that, then: "
            f"mkdir -p {folder} && cp -r {state} {folder}/ && rm -r {left}"
        )
        return False
    shutil.rmtree(kept.folder, ignore_errors=True)
    return True
