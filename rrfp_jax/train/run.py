"""A run from its config: train, validate, and keep its files in `<directory>/<name>/`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import flax
import jax

from rrfp_jax.errors import UsageError
from rrfp_jax.train.config import RunConfig, as_json
from rrfp_jax.train.data import as_data, plan_step
from rrfp_jax.train.display import Display
from rrfp_jax.train.reference import stage_table
from rrfp_jax.train.report import Evaluation, Report
from rrfp_jax.train.text import ByteText, bigram_loss
from rrfp_jax.train.trainer import Trainer


def train(config: RunConfig) -> None:
    """Train a run to its end.

    Raises:
        UsageError: it cannot work; nothing has been written then.
        TrainingError: it broke off. KeyboardInterrupt: it was broken off. The files are complete then, too.
    """
    trainer = config.trainer()
    validation = config.validation_data()
    if validation is not None:
        plan_step(as_data(validation), 0)  # so that missing data is refused now
    print(
        f"rrfp_jax on jax {jax.__version__}, flax {flax.__version__}; {config.name}: {config.steps} steps, "
        f"{config.mesh.pp} stages on {', '.join(str(d) for d in jax.local_devices())}, "
        f"schedule {config.schedule}"
    )
    files = RunFiles(config, trainer)
    began = perf_counter()
    table = trainer.start()
    print(stage_table(table))
    print(f"ready after {perf_counter() - began:.1f} s of compiling and allocating", flush=True)
    with files, Display(config.steps) as display:
        for report in trainer.steps(config.steps):
            last = report.step == config.steps - 1
            due = last or (config.validate_every and (report.step + 1) % config.validate_every == 0)
            found = None
            try:
                if due and validation is not None:
                    found = trainer.evaluate(validation)
            finally:  # a step's line is written even if its validation is broken off
                files.add(report, found)
            display.show(report, found)
    if found is not None:
        print(f"validation loss {found.loss:.4f} nats per token over {found.weight:,.0f} tokens")
        data = config.train_data()
        if isinstance(data, ByteText) and isinstance(validation, ByteText):
            print(
                f"           beside it {bigram_loss(data, validation):.4f}: a byte bigram model, same files"
            )
    print(f"files: {files.folder}/config.json, metrics.jsonl, trace.json (open it at ui.perfetto.dev)")


class RunFiles:
    """`config.json`, `metrics.jsonl` (a line per step) and `trace.json` (the latest steps) of a run."""

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self.folder = Path(config.directory) / config.name
        self._config, self._trainer = config, trainer

        parent = Path(config.directory)
        while not parent.exists():
            parent = parent.parent
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"{self.folder}: {parent} cannot be written; set --config.directory")

    def __enter__(self) -> RunFiles:
        try:
            if self.folder.exists():
                print(f"an earlier run is kept as {_move_away(self.folder)}")
            self.folder.mkdir(parents=True)
            text = json.dumps(as_json(self._config), indent=2, default=str)
            (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")
            self._metrics = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            reason = f"{self.folder}: cannot be written: {error.strerror}; set --config.directory"
            raise UsageError(reason) from error
        return self

    def add(self, report: Report, validation: Evaluation | None) -> None:
        """Write a step's line; complete at once, so a run can be watched and nothing is lost."""
        line: dict[str, Any] = report.as_dict()
        if validation is not None:
            line["validation_loss"] = validation.loss
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self._metrics.close()
        self._trainer.write_trace(self.folder / "trace.json")
        if kind is not None:
            how = "interrupted" if kind is KeyboardInterrupt else "broken off"
            print(f"\n{how} after {self._trainer.steps_done} steps; files: {self.folder}/")


def _move_away(folder: Path) -> Path:
    """Rename a folder to the first free `<name>.<number>`."""
    number = 1
    while (new := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(new)
