"""A run from its config: train, validate, answer signals, and keep its files in `<directory>/<name>/`."""

from __future__ import annotations

import os
import platform
import shlex
import signal
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax

from rrfp_jax import printing
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.data.byte_text import ByteText, bigram_loss
from rrfp_jax.data.contract import as_data, plan_step, steps_of
from rrfp_jax.data.documents import Documents
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, HANDED_OVER, INTERRUPTED, TrainingError, caused_by
from rrfp_jax.progress import during
from rrfp_jax.report.store import STEPS
from rrfp_jax.report.timeline import can_draw
from rrfp_jax.runs.config import RunConfig, as_json, fields_of
from rrfp_jax.runs.display import Display
from rrfp_jax.runs.files import RunFiles, check_place, hardware_of
from rrfp_jax.runs.name_held import name_held
from rrfp_jax.runs.saving import Saver, started_again
from rrfp_jax.runtime.engine.settings import is_whole
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.run.exits import fail
from rrfp_jax.runtime.run.host_memory import FOLDER, HostMemory
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.place import gpu_names
from rrfp_jax.runtime.run.signals import EndsAtOnce, StopReason, StopsAfterStep, StopSignals, save_seconds
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.memory import StageLedger
from rrfp_jax.train.compile_ahead import MadeFor, why_compiled
from rrfp_jax.train.reference import stage_table
from rrfp_jax.train.report import Evaluation, Report
from rrfp_jax.train.trainer import Trainer
from rrfp_jax.typed import NAME, typed_command, without_flag
from rrfp_jax.user_code import called

RESUME = "--config.checkpoint.resume"


def checkpoints_of(config: RunConfig) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.directory) / f"{config.name}.checkpoints"


class Stopping:
    """What is said, by rank 0 or by whoever has a terminal of its own, when a run is asked to stop."""

    def __init__(self, config: RunConfig, world: World, display: Display) -> None:
        self.config, self.world, self.display = config, world, display
        self._folder = checkpoints_of(config)

    def at_start(self) -> EndsAtOnce:
        """The answer before the first step, when a rank has nothing to save."""
        return EndsAtOnce(self._say_start, self._end)

    def say_end(self, step: int, saved: bool) -> int:
        """Say after which step the run has stopped, and how to go on; the exit status that goes with it."""
        why, latest = self.world.stop.agreed, self._latest()
        if why is StopReason.HANDS_OVER:
            self.display.say(f"stopped after step {step}, as lost ranks are replaced")
            return HANDED_OVER
        if latest is None:
            self.display.say(f"{why}: stopped after step {step}; nothing is saved")
            return INTERRUPTED
        which = "" if saved else ", which could not be saved"
        self.display.say(f"{why}: stopped after step {step}{which}; resumes from {latest}\n{self._how()}")
        return INTERRUPTED if why is StopReason.CTRL_C or not saved else DONE

    def _say_start(self) -> None:
        latest = self._latest()
        lost = "nothing was trained yet" if latest is None else f"nothing is lost; resumes from {latest}"
        if ENVIRONMENT.get(FOLDER) and started_again():
            lost = "what only the host's memory has is lost, as the run saves no checkpoints"
            if self.config.checkpoint.wanted:
                lost = "the launcher saves next what only the host's memory has"
        self._say(f"Ctrl-C while starting: ends; {lost}\n{self._how()}")

    def say_answer(self, trainer: Trainer, why: StopReason, at_once: bool) -> None:
        """Say what a signal does between the first step and the end of the run."""
        if at_once:
            latest = self._latest()
            lost = "nothing is saved" if latest is None else f"resumes from {latest}\n{self._how()}"
            return self._say(f"{why} again: ends at once; {lost}")
        what = "stops after this step and saves nothing, as no interval is set"
        if trainer.steps_done >= self.config.steps:
            what = "all steps have been trained: validates, saves and ends"
        elif self.config.checkpoint.wanted:
            what = "stops after this step and saves itself"
        self._say(f"{why}: {what}; a second one ends it at once")

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            self.display.say(text)
        elif printing.is_terminal():
            printing.say(text)

    def _latest(self) -> Path | None:
        """The latest checkpoint."""
        steps = CheckpointFolder(self._folder).steps() if self.config.checkpoint.wanted else []
        return self._folder / str(steps[-1]) if steps else None

    def _how(self) -> str:
        """The command that goes on with the run, in words."""
        if self.world.size > 1 and NAME not in ENVIRONMENT:
            return "to resume: start all ranks again as before"
        command = without_flag(typed_command(), RESUME)
        if not self.config.checkpoint.resume and self._latest() is not None:
            command += f" {shlex.quote(RESUME)}=True"
        return f"to resume: {command}"

    def _end(self) -> None:
        self.display.close()
        fail(self.world, KeyboardInterrupt())


class Followed(NamedTuple):
    """What has followed a step.

    Attributes:
        validation: after it, if there was one.
        ends: it was the run's last.
        stops: the run stops here, because a signal came or lost ranks are replaced, and can go on later.
    """

    validation: Evaluation | None
    ends: bool
    stops: bool


def _to_open_next(folder: Path) -> str:
    """What shows more of a run, as commands for the shell that it was started from."""
    program = shlex.split(typed_command())[:2]  # perhaps with the interpreter before it
    rrfp = next((word for word in program if Path(word).name == "rrfp"), "rrfp")
    run = shlex.quote(str(folder))
    page = f"; draws {run}/report.html" if can_draw() else ""
    return (
        f"next:\n"
        f"  {rrfp} report {run}  # why each stage was idle{page}\n"
        f"  {rrfp} top {run}  # the latest steps; live while a run lasts"
    )


def train(config: RunConfig, signals: StopSignals, source: Path | None = None) -> int:
    """Train a run to its end; rank 0 prints, and writes the files.

    Ctrl-C and SIGTERM stop it after a step, see `Stopping`; the files are complete then, too.

    Args:
        config: of the run.
        signals: that this process hears.
        source: file of the config; None if there is none.

    Returns:
        The exit status: 0 if it is done, or has saved itself for SIGTERM; 130 if it was interrupted, or could
        not save itself for SIGTERM; 1 if its last step could not be saved.

    Raises:
        UsageError: it cannot work, or a live run has its name; nothing has been written then.
        TrainingError: it broke off. The files are complete then, too.
    """
    world = join()
    check_place(config)
    world.stop.forget()  # an earlier run of this process
    with closing(Display(config.steps, silent=world.rank > 0)) as display:
        stopping = Stopping(config, world, display)
        name = name_held(world, Path(config.directory) / config.name, display.say)
        with signals.answered_by(stopping.at_start()), name:
            return _Run(stopping, source).train(signals)


class _Run:
    """A run of a model: prepared, trained, and told of."""

    def __init__(self, stopping: Stopping, source: Path | None) -> None:
        self._config, self._world, self._display = stopping.config, stopping.world, stopping.display
        self._stopping, self._source = stopping, source
        self._memory = HostMemory.of(ENVIRONMENT)
        self._mesh = self._config.mesh
        if self._memory is not None:  # some replicas may have been lost
            self._mesh = replace(self._mesh, dp=self._memory.replicas)

    def train(self, signals: StopSignals) -> int:
        """See `train`."""
        config, world = self._config, self._world
        self._trainer, self._validation = trainer, validation = self._made()
        folder, say = checkpoints_of(config), self._display.say
        self._saver = saver = Saver(trainer, config.checkpoint, folder, say, self._memory)
        there = saver.look_ahead(as_json(config))
        if there >= config.steps:
            self._display.say(
                f"{there} steps have been trained already: nothing is left to do. For more set "
                f"--config.steps, to begin anew --config.checkpoint.resume=False"
            )
            return DONE
        table = self._started(trainer, validation)
        done = saver.resume()
        trace, costs = trainer.write_trace, trainer.write_costs
        writes = {STEPS: trace, "trace.json": trace, "costs.json": costs}
        hardware = self._found_hardware()
        self._files = files = RunFiles(config, world, writes, done, self._source, hardware, say)
        say_answer = partial(self._stopping.say_answer, trainer)
        answer = StopsAfterStep(world, save_seconds(ENVIRONMENT), say_answer, leave=self._display.close)
        with signals.answered_by(answer, signal.SIGTERM), files:
            files.write("memory.json", [row.plain() for row in table])
            for report in trainer.steps(config.steps - done):  # one at least, the last of which ends
                last = self._follow(report)
                if last.ends or last.stops:
                    break
            if world.stop.agreed is StopReason.ASKED:
                self._display.say(f"ended after step {report.step}, as the config's own method asked")
            if last.validation is not None and last.ends:
                self._say_validation(last.validation, validation)
        if hardware["shared"]:
            self._display.say(hardware["shared"])
        self._display.say(
            f"files: {files.folder}/config.json, memory.json, metrics.jsonl, costs.json, {STEPS}, "
            f"trace.json (open it at ui.perfetto.dev)\n{_to_open_next(files.folder)}"
        )
        if last.stops:
            if files.trouble:
                self._display.say(files.trouble)
            return self._stopping.say_end(report.step, saver.saved)
        steps, lost, culprit = report.step + 1, "", world.rank
        latest = trainer._stepper.saves.latest
        if config.checkpoint.wanted and latest is not None and not saver.saved:
            culprit, why = latest.trouble
            lost = f"the checkpoint {folder / str(steps)} could not be written by {why}"
        if troubles := "; ".join(filter(None, [lost, files.trouble])):
            raise caused_by(culprit, world.rank, f"all {steps} steps were trained, but {troubles}")
        return DONE

    def _found_hardware(self) -> dict[str, str]:
        """See `hardware_of`; of all processes."""
        devices = jax.local_devices()
        used = devices[: self._mesh.devices] if self._world.size == 1 else devices
        on_cpu = devices[0].platform == "cpu"
        names = [f"{self._world.rank}.{i}" for i in range(len(used))] if on_cpu else gpu_names(used)
        here = platform.node(), sorted(os.sched_getaffinity(0)), devices[0].device_kind, names
        return hardware_of([tuple(own) for own in self._world.gather("the machines", here)], on_cpu)

    def _follow(self, report: Report) -> Followed:
        found = None
        try:
            ends = self._wants_end("on_step", report) or report.step == self._config.steps - 1
            every = self._config.validate_every
            due = ends or (every > 0 and (report.step + 1) % every == 0)
            if due and self._validation is not None and (ends or not self._is_pressed):
                found = self._validated(ends)
        finally:  # a step's line is written even if what follows it is broken off
            step = replace(report.recorded, ranks=report.ranks)
            self._files.add(step, report.as_dict() | (found.as_dict() if found is not None else {}))
        self._display.show(report, found)
        if found is not None:
            ends |= self._wants_end("on_validation", report, found)
        stops = self._world.stop.agreed > StopReason.ASKED and not ends
        hands_over = stops and self._world.stop.agreed is StopReason.HANDS_OVER
        self._saver.after_step(report, ends=ends or (stops and not hands_over))
        if hands_over:
            stops = self._hands_over()
        elif self._memory is not None and self._memory.request.exists():
            self._world.stop.request(StopReason.HANDS_OVER)  # which all know at the end of the next step
        return Followed(found, ends, stops)

    def _hands_over(self) -> bool:
        """Whether it stops here: its state must be somewhere to go on from. A signal may have come, too."""
        if (self._is_pressed or not self._saver.keeps) and not self._saver.rescue():
            return self._is_pressed
        self._trainer.finish_saving()
        return True

    @property
    def _is_pressed(self) -> bool:
        """Whether it stops because a signal came, and validates no more."""
        return self._world.stop.agreed > StopReason.HANDS_OVER

    def _validated(self, ends: bool) -> Evaluation | None:
        """The validation; None if the run stops during it. The one at the end is always finished."""
        found, asked = [], self._config.validation_steps
        held = getattr(as_data(self._validation), "steps", 0)  # beyond them it would begin again
        count = min(asked, held) if is_whole(held) and held > 0 else asked
        with closing(self._trainer._evaluating(self._validation, count or None)) as steps:
            for sums in steps:
                found.append(sums)
                if self._is_pressed and not ends:
                    return None
        return Evaluation.of(found)

    def _wants_end(self, name: str, *about: Any) -> bool:
        """Call a method of the config; whether the run is to end here, as all processes then know."""
        if getattr(type(self._config), name) is getattr(RunConfig, name):
            return False  # nobody need be asked
        with called(f"{type(self._config).__name__}.{name}()", TrainingError):
            wants = bool(getattr(self._config, name)(*about))
        if wants:
            self._world.stop.request(StopReason.ASKED)
        return any(self._world.gather(f"whether {name} ends the run", wants)) and not self._is_pressed

    def _made(self) -> tuple[Trainer, Any]:
        """The Trainer, and the validation data."""
        config, world = self._config, self._world
        chooses = config.schedule.startswith("auto") or config.layers_per_virtual_stage == "auto"
        with during(self._display.tell, "choosing schedule and split" if chooses else "reading data"):
            trainer = config.trainer(self._mesh)
            validation = config.made("validation_data")
            if validation is not None:
                plan_step(as_data(validation), 0)  # so that missing data is refused now
                if not config.validation_steps:
                    steps_of(as_data(validation))
        world.agree("the config", {name: str(value) for name, value, _ in fields_of(config)})
        processes = f" of {world.size} processes" if world.size > 1 else ""
        self._display.say(
            f"rrfp_jax on jax {jax.__version__}, flax {version('flax')}; {config.name}: {config.steps} "
            f"steps, {_sizes(self._mesh)} on {', '.join(map(str, jax.devices()))}{processes}, "
            f"schedule {config.schedule}"
        )
        return trainer, validation

    def _started(self, trainer: Trainer, validation: Any) -> Sequence[StageLedger]:
        """Compile and allocate; what each stage needs."""
        began = perf_counter()
        table = trainer.start(validation, progress=self._display.tell)
        self._display.say(stage_table(table))
        compiled, loaded = trainer._programs
        seconds = perf_counter() - began
        whose = f" by all {self._world.size} processes" if self._world.size > 1 else ""
        self._display.say(
            f"ready after {seconds:.1f} s: {compiled} programs compiled, {loaded} loaded{whose}: those of "
            f"stages, their updates and initial values"
        )
        folder = self._config.settings.executables
        if compiled and folder is not None:
            here = MadeFor.of(jax.local_devices()[0], self._world.size)
            if (reason := why_compiled(Path(folder), self._config.name, here)) is not None:
                self._display.say(reason)
        return table

    def _say_validation(self, found: Evaluation, validation: Any) -> None:
        documents = isinstance(validation, Documents) and not validation.corpus.patches
        is_text = documents or isinstance(validation, ByteText)
        unit, counted = (" nats per token", " tokens") if is_text else ("", "")
        metrics = "".join(f"  {name} {value:.4f}" for name, value in found.metrics.items())
        over = f"{'' if is_text else 'a weight of '}{found.weight:,.0f}{counted}"
        self._display.say(f"validation loss {found.loss:.4f}{unit}{metrics}  (over {over})")
        data = self._trainer._data
        if self._world.rank == 0 and isinstance(data, ByteText) and isinstance(validation, ByteText):
            bigrams = bigram_loss(data, validation, self._config.validation_steps)
            self._display.say(f"  a byte bigram model {bigrams:.4f} on the same bytes")


def _sizes(mesh: Mesh) -> str:
    """A mesh in words: "4 stages", "2 stages of 4, 2 devices in 2 replicas"."""
    widths = mesh.widths if len(set(mesh.widths)) > 1 else mesh.widths[:1]
    each = f" of {', '.join(map(str, widths))} devices" if max(widths) > 1 else ""
    return f"{mesh.pp} stages{each}" + (f" in {mesh.dp} replicas" if mesh.dp > 1 else "")
