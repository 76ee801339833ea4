"""Loggers: what reports say, to TensorBoard or Weights & Biases; `examples/prometheus.py` has another.

    logger = rrfp.loggers.tensorboard("tensorboard/mine")  # then: tensorboard --logdir tensorboard
    trainer = rrfp.Trainer(pipe, optimizer, data=corpus, on_step=logger.on_step)

All processes call a logger; the first of them writes. Another one is any object with the same three methods,
which may take `figures_of` for what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, NamedTuple

from rrfp_jax.errors import imported
from rrfp_jax.fields import path_of
from rrfp_jax.runtime.run.join import join
from rrfp_jax.train.report import Evaluation, Report

__all__ = ["Logger", "Sink", "figures_of", "tensorboard", "wandb"]

FLUSH_SECONDS = 10
"""After so long a figure is in TensorBoard's file, so that a run can be watched."""


class Sink(NamedTuple):
    """Where metrics go: `write(step, figures)`, and `close()`."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], object]


class Logger:
    """Writes the metrics of reports. Call it in every process; rank 0 writes.

    Args:
        make: opens what is written to, given the first step; called when that is reported, and anew when
            steps go back.
        at_once: open it now, as for step 0.
    """

    def __init__(self, make: Callable[[int], Sink], *, at_once: bool = False) -> None:
        self._make, self._sink = make, make(0) if at_once and join().rank == 0 else None
        self._last = 0  # step written
        self._first: dict[str, float] | None = None  # of hyperparameters that have not changed

    def on_step(self, report: Report) -> None:
        """Write a step's metrics; also for `Trainer(on_step=...)`.

        Hyperparameters other than learning rates are written from their first change on: most of those that
        `optax.inject_hyperparams` keeps are constants, such as Adam's b1.
        """
        figures = figures_of(report)
        self._first = {
            name: value
            for name, value in figures.items()
            if name.startswith("hyperparams/")
            and not name.endswith("learning_rate")
            and (self._first is None or self._first.get(name) == value)
        }
        self._write(report.step, {n: value for n, value in figures.items() if n not in self._first})

    def on_validation(self, report: Report, evaluation: Evaluation) -> None:
        """Write those of the validation after a step."""
        figures = {"loss": evaluation.loss, **evaluation.metrics}
        self._write(report.step, {f"validation/{name}": value for name, value in figures.items()})

    def close(self) -> None:
        """Have everything written. At the end of the process that is done, too."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        if join().rank > 0:
            return
        if step < self._last:  # of a run that begins anew, which W&B would drop
            self.close()
        self._last = step
        if self._sink is None:
            self._sink = self._make(step)
        self._sink.write(step, figures)


def figures_of(report: Report) -> dict[str, float]:
    """A report's metrics as loggers name them: "train/loss", "hyperparams/learning_rate", "idle/stage_0"."""
    others = ("gradient_norm", "parameter_norm", "loss_scale", "skipped")
    speeds = ("tokens_per_second", "step_seconds", "load_seconds")
    return {
        "train/loss": report.loss,
        **{f"train/{name}": value for name, value in report.metrics.items()},
        **{f"train/{name}": getattr(report, name) for name in others},
        **{f"hyperparams/{name}": value for name, value in report.hyperparams.items()},
        **{f"speed/{name}": getattr(report, name) for name in speeds},
        **{f"idle/stage_{stage}": share for stage, share in enumerate(report.bubble)},
        **{f"memory/stage_{stage}_peak_bytes": size for stage, size in enumerate(report.peak_bytes)},
    }


def tensorboard(folder: str | PathLike[str], **options: Any) -> Logger:
    """To TensorBoard's files. A run that resumes or begins anew writes into the same folder.

    Args:
        folder: of this run; `tensorboard --logdir` takes it, or one above it.
        **options: of `tensorboardX.SummaryWriter`.

    Raises:
        UsageError: the package tensorboardX is not there, or `folder` is no path.
    """
    package = imported("tensorboardX", "rrfp_jax.loggers.tensorboard")
    path = path_of("loggers.tensorboard: folder", folder)

    def make(step: int) -> Sink:
        # What an earlier start wrote of this step and later ones is not shown: they are done once more.
        chosen = {"flush_secs": FLUSH_SECONDS, "purge_step": step, **options}
        writer = package.SummaryWriter(str(path), **chosen)

        def write(step: int, figures: Mapping[str, float]) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)

        return Sink(write, writer.close)

    return Logger(make)


def wandb(project: str, **options: Any) -> Logger:
    """To Weights & Biases; if steps go back, as when a notebook's cell runs again, to a new run there.

    Args:
        project: its name there.
        **options: of `wandb.init`: `name`, `config`, `dir`, `id` with `resume` to continue a run. With
            `mode="offline"` nothing is sent; `wandb sync` does that later.

    Raises:
        UsageError: the package wandb is not there.
    """
    package = imported("wandb", "rrfp_jax.loggers.wandb")

    def make(step: int) -> Sink:
        run = package.init(project=project, **options)
        return Sink(lambda step, figures: run.log(dict(figures), step=step), run.finish)

    return Logger(make)
