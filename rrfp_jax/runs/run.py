"""A run from its config: train, validate, and keep its files in `<directory>/<name>/`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from rrfp_jax.data.contract import as_data, plan_step
from rrfp_jax.data.text import ByteText, bigram_loss
from rrfp_jax.runs.config import RunConfig, as_json, fields_of
from rrfp_jax.runs.display import Display
from rrfp_jax.runs.files import RunFiles
from rrfp_jax.runs.paced import PacedRun
from rrfp_jax.runs.saving import Saver
from rrfp_jax.runtime.lifecycle.join import join
from rrfp_jax.runtime.lifecycle.preemption import save_seconds, sigterm_noted
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.processes.world import World
from rrfp_jax.train.reference import stage_table
from rrfp_jax.train.report import Evaluation
from rrfp_jax.train.trainer import Trainer


def train(config: RunConfig) -> None:
    """Train a run to its end; rank 0 prints, and writes the files.

    Raises:
        UsageError: it cannot work; nothing has been written then.
        TrainingError: it broke off. KeyboardInterrupt: it was broken off, by Ctrl-C or, after a step, by
            SIGTERM. The files are complete then, too.
    """
    if config.pace.workload:
        _run_paced(config)
        return
    trainer = config.trainer()
    validation = config.made("validation_data")
    if validation is not None:
        plan_step(as_data(validation), 0)  # so that missing data is refused now
    world = join()
    world.agree("the config", {name: str(value) for name, value in fields_of(config)})
    say = _say_on_rank_0(world)
    processes = f" of {world.size} processes" if world.size > 1 else ""
    say(
        f"rrfp_jax on jax {jax.__version__}, flax {version('flax')}; {config.name}: {config.steps} steps, "
        f"{_sizes(config.mesh)} on {', '.join(map(str, jax.devices()))}{processes}, "
        f"schedule {config.schedule}"
    )
    began = perf_counter()
    table = trainer.start(validation)
    say(stage_table(table))
    compiled, loaded = trainer.programs
    say(f"ready after {perf_counter() - began:.1f} s: {compiled} programs compiled, {loaded} loaded")
    saver = Saver(trainer, config.checkpoint, Path(config.directory) / f"{config.name}.checkpoints", say)
    done = saver.resume(as_json(config), world)
    if done >= config.steps:
        with RunFiles(config, world, {}, done):
            say(
                f"{done} steps have been trained already: nothing is left to do. For more set "
                f"--config.steps, to begin anew --config.checkpoint.resume=False"
            )
        return
    writes = {"trace.json": trainer.write_trace, "costs.json": trainer.write_costs}
    files = RunFiles(config, world, writes, done)
    display = Display(config.steps, silent=world.rank > 0)
    with files, sigterm_noted(world, save_seconds(os.environ)), display:
        files.write("memory.json", [row.plain() for row in table])
        found = _steps(config, trainer, validation, saver, files, display)
    if found is not None:
        say(f"validation loss {found.loss:.4f} nats per token over {found.weight:,.0f} tokens")
        data = config.made("train_data")
        if world.rank == 0 and isinstance(data, ByteText) and isinstance(validation, ByteText):
            say(f"           beside it {bigram_loss(data, validation):.4f}: a byte bigram model, same files")
    say(
        f"files: {files.folder}/config.json, memory.json, metrics.jsonl, costs.json, "
        f"trace.json (open it at ui.perfetto.dev)"
    )


def _steps(
    config: RunConfig, trainer: Trainer, validation: Any, saver: Saver, files: RunFiles, display: Display
) -> Evaluation | None:
    """Train to the end, or until all processes have agreed to stop; the last validation, if it got there.

    Raises:
        KeyboardInterrupt: they have, and there are no checkpoints to go on from.
    """
    world, found = join(), None
    for report in trainer.steps(config.steps - trainer.steps_done):
        last = report.step == config.steps - 1
        stops = world.stop.agreed and not last
        due = last or (config.validate_every and (report.step + 1) % config.validate_every == 0)
        found = None
        try:
            if due and not stops and validation is not None:
                found = trainer.evaluate(validation)
        finally:  # a step's line is written even if its validation is broken off
            validated = {"validation_loss": found.loss} if found else {}
            files.add(report.as_dict() | validated)
        display.show(report, found)
        saver.after_step(report, ends=last or stops)
        if stops:
            saver.stop(report)
            return None
    return found


def _run_paced(config: RunConfig) -> None:
    """The same on paced devices: no loss, no validation, no optimizer."""
    run = PacedRun(config)
    world = join()
    world.agree("the config", {name: str(value) for name, value in fields_of(config)})
    say = _say_on_rank_0(world)
    workload = config.pace.table
    say(
        f"rrfp_jax on paced devices; {config.name}: {config.steps} steps, {workload.stages} stages, "
        f"{workload.microbatches} microbatches, messages of {config.pace.message_bytes} bytes, "
        f"schedule {config.schedule}, jitter {config.jitter}"
    )
    files = RunFiles(config, world, {"trace.json": run.write_trace})
    with files, Display(config.steps, silent=world.rank > 0) as display:
        for report in run.steps(config.steps):
            files.add(report.as_dict())
            display.show(report, None)
    say(f"files: {files.folder}/config.json, metrics.jsonl, trace.json (open it at ui.perfetto.dev)")


def _sizes(mesh: Mesh) -> str:
    """A mesh in words: "4 stages", "2 stages of 4, 2 devices in 2 replicas"."""
    widths = mesh.widths if len(set(mesh.widths)) > 1 else mesh.widths[:1]
    each = f" of {', '.join(map(str, widths))} devices" if max(widths) > 1 else ""
    return f"{mesh.pp} stages{each}" + (f" in {mesh.dp} replicas" if mesh.dp > 1 else "")


def _say_on_rank_0(world: World) -> Callable[[str], None]:
    return functools.partial(print, flush=True) if world.rank == 0 else lambda text: None
