"""A run from its config: train, validate, and keep its files in `<directory>/<name>/`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from rrfp_jax.data.byte_text import ByteText, bigram_loss
from rrfp_jax.data.contract import as_data, plan_step
from rrfp_jax.data.documents import Documents
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, TrainingError
from rrfp_jax.progress import during
from rrfp_jax.report.store import STEPS
from rrfp_jax.runs.config import RunConfig, as_json, fields_of
from rrfp_jax.runs.display import Display
from rrfp_jax.runs.files import RunFiles, check_place
from rrfp_jax.runs.loop import Loop
from rrfp_jax.runs.saving import Saver
from rrfp_jax.runs.stopping import Stopping, checkpoints_of
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.run.host_memory import HostMemory
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.name_lock import name_held
from rrfp_jax.runtime.run.signals import StopReason, StopSignals
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.memory import StageLedger
from rrfp_jax.train.compile_ahead import MadeFor, why_compiled
from rrfp_jax.train.reference import stage_table
from rrfp_jax.train.report import Evaluation
from rrfp_jax.train.trainer import Trainer


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
    with Display(config.steps, silent=world.rank > 0) as display:
        stopping = Stopping(config, world, display)
        name = name_held(world, Path(config.directory) / config.name, display.say)
        with signals.answered_by(stopping.at_start()), name:
            return _Run(config, world, display, stopping, source).train(signals)


class _Run:
    """A run of a model: prepared, trained, and told of.

    Args:
        config: of the run.
        world: its processes.
        display: shows it.
        stopping: says how it stops.
        source: file of the config, if there is one.
    """

    def __init__(
        self, config: RunConfig, world: World, display: Display, stopping: Stopping, source: Path | None
    ) -> None:
        self._config, self._world, self._display, self._stopping = config, world, display, stopping
        self._source = source
        self._memory = HostMemory.of(ENVIRONMENT)
        self._mesh = config.mesh
        if self._memory is not None:  # some replicas may have been lost
            self._mesh = replace(config.mesh, dp=self._memory.replicas)

    def train(self, signals: StopSignals) -> int:
        """See `train`."""
        config, world = self._config, self._world
        trainer, validation = self._made()
        folder, say = checkpoints_of(config), self._display.say
        saver = Saver(trainer, world, config.checkpoint, folder, say, self._memory)
        there = saver.look_ahead(as_json(config))
        if there >= config.steps:
            self._display.say(
                f"{there} steps have been trained already: nothing is left to do. For more set "
                f"--config.steps, to begin anew --config.checkpoint.resume=False"
            )
            return DONE
        table = self._started(trainer, validation)
        done = saver.resume()
        writes = {STEPS: trainer.write_trace, "trace.json": trainer.write_trace}
        writes["costs.json"] = trainer.write_costs
        files = RunFiles(config, world, writes, done, self._source, say)
        answer = self._stopping.in_steps(lambda: trainer.steps_done)
        with signals.answered_by(answer, signal.SIGTERM), files:
            files.write("memory.json", [row.plain() for row in table])
            loop = Loop(
                config=config,
                world=world,
                trainer=trainer,
                validation=validation,
                saver=saver,
                files=files,
                display=self._display,
                memory=self._memory,
            )
            last = loop.run()
            if world.stop.agreed is StopReason.ASKED:
                self._display.say(f"ended after step {last.report.step}, as the config's own method asked")
            if last.validation is not None and last.ends:
                self._say_validation(last.validation, validation)
        self._display.say(
            f"files: {files.folder}/config.json, memory.json, metrics.jsonl, costs.json, {STEPS}, "
            f"trace.json (open it at ui.perfetto.dev)"
        )
        if last.stops:
            if files.trouble:
                self._display.say(files.trouble)
            return self._stopping.say_end(last.report.step, saver.saved)
        steps, lost = last.report.step + 1, ""
        if config.checkpoint.wanted and not saver.saved and world.rank == 0:
            lost = f"the checkpoint {folder / str(steps)} could not be written"
        _require_all_there(steps, lost, files.trouble)
        return DONE

    def _made(self) -> tuple[Trainer, Any]:
        """The Trainer, and the validation data."""
        config, world = self._config, self._world
        chooses = config.schedule.startswith("auto") or config.layers_per_virtual_stage == "auto"
        with during(self._display.tell, "choosing schedule and split" if chooses else "reading data"):
            trainer = config.trainer(self._mesh)
            validation = config.made("validation_data")
            if validation is not None:
                plan_step(as_data(validation), 0)  # so that missing data is refused now
        world.agree("the config", {name: str(value) for name, value in fields_of(config)})
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
        self._display.say(f"ready after {seconds:.1f} s: {compiled} programs compiled, {loaded} loaded")
        folder = self._config.settings.executables
        if compiled and folder is not None:
            here = MadeFor.of(jax.local_devices()[0], self._world.size)
            if (reason := why_compiled(Path(folder), self._config.name, here)) is not None:
                self._display.say(reason)
        return table

    def _say_validation(self, found: Evaluation, validation: Any) -> None:
        is_text = isinstance(validation, (ByteText, Documents))
        unit, counted = (" nats per token", " tokens") if is_text else ("", "")
        metrics = "".join(f"  {name} {value:.4f}" for name, value in found.metrics.items())
        over = f"{'' if is_text else 'a weight of '}{found.weight:,.0f}{counted}"
        self._display.say(f"validation loss {found.loss:.4f}{unit}{metrics}  (over {over})")
        data = self._config.made("train_data")
        if self._world.rank == 0 and isinstance(data, ByteText) and isinstance(validation, ByteText):
            beside = bigram_loss(data, validation)
            self._display.say(f"           beside it {beside:.4f}: a byte bigram model, same files")


def _require_all_there(steps: int, *troubles: str) -> None:
    """Raise TrainingError if something of a run that was trained to its end could not be kept."""
    if any(troubles):
        raise TrainingError(f"all {steps} steps were trained, but {'; '.join(filter(None, troubles))}")


def _sizes(mesh: Mesh) -> str:
    """A mesh in words: "4 stages", "2 stages of 4, 2 devices in 2 replicas"."""
    widths = mesh.widths if len(set(mesh.widths)) > 1 else mesh.widths[:1]
    each = f" of {', '.join(map(str, widths))} devices" if max(widths) > 1 else ""
    return f"{mesh.pp} stages{each}" + (f" in {mesh.dp} replicas" if mesh.dp > 1 else "")
