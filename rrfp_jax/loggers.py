"""Loggers: what reports say, to TensorBoard, Weights & Biases or Prometheus.

    logger = rrfp.loggers.tensorboard("tensorboard/mine")  # then: tensorboard --logdir tensorboard
    trainer = rrfp.Trainer(pipe, optimizer, data=corpus, on_step=logger.on_step)

All processes call a logger; the first of them writes. Another one is any object with the same three methods,
which may take `figures_of` for what is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Literal, NamedTuple

from rrfp_jax.errors import UsageError, imported
from rrfp_jax.fields import path_of, shown
from rrfp_jax.runtime.run.join import join
from rrfp_jax.train.report import Evaluation, Report

__all__ = ["Logger", "figures_of", "prometheus", "tensorboard", "wandb"]

FLUSH_SECONDS = 10
"""After so long a figure is in TensorBoard's file, so that a run can be watched."""


class Sink(NamedTuple):
    """Where figures go: `write(step, figures)`, and `close()`."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], object]


class Logger:
    """Writes the figures of reports. Call it in every process; rank 0 writes.

    Args:
        make: opens what is written to, given the first step; called when that is reported.
        sink: what is written to, if that is open already.
    """

    def __init__(self, make: Callable[[int], Sink], sink: Sink | None = None) -> None:
        self._make, self._sink = make, sink
        self._first: dict[str, float] | None = None  # of hyperparameters that have not changed

    def on_step(self, report: Report) -> None:
        """Write a step's figures; also for `Trainer(on_step=...)`.

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
        if self._sink is None:
            self._sink = self._make(step)
        self._sink.write(step, figures)


def figures_of(report: Report) -> dict[str, float]:
    """A report's figures as loggers name them: "train/loss", "hyperparams/learning_rate", "idle/stage_0"."""
    return {
        "train/loss": report.loss,
        **{f"train/{name}": value for name, value in report.metrics.items()},
        "train/gradient_norm": report.gradient_norm,
        "train/parameter_norm": report.parameter_norm,
        "train/loss_scale": report.loss_scale,
        "train/skipped": report.skipped,
        **{f"hyperparams/{name}": value for name, value in report.hyperparams.items()},
        "speed/tokens_per_second": report.tokens_per_second,
        "speed/step_seconds": report.step_seconds,
        "speed/load_seconds": report.load_seconds,
        **{f"idle/stage_{stage}": share for stage, share in enumerate(report.bubble)},
        **{f"memory/stage_{stage}_peak_bytes": size for stage, size in enumerate(report.peak_bytes)},
    }


def tensorboard(folder: str | PathLike[str], **options: Any) -> Logger:
    """To TensorBoard's files. A run that goes on from a checkpoint writes into the same folder.

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
        chosen = {"flush_secs": FLUSH_SECONDS, "purge_step": step or None, **options}
        writer = package.SummaryWriter(str(path), **chosen)

        def write(step: int, figures: Mapping[str, float]) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)

        return Sink(write, writer.close)

    return Logger(make)


def wandb(project: str, **options: Any) -> Logger:
    """To Weights & Biases.

    Args:
        project: its name there.
        **options: of `wandb.init`: `name`, `config`, `dir`, `id` with `resume` to go on with a run. With
            `mode="offline"` nothing is sent; `wandb sync` does that later.

    Raises:
        UsageError: the package wandb is not there.
    """
    package = imported("wandb", "rrfp_jax.loggers.wandb")

    def make(step: int) -> Sink:
        run = package.init(project=project, **options)
        return Sink(lambda step, figures: run.log(dict(figures), step=step), run.finish)

    return Logger(make)


class Metric(NamedTuple):
    """A metric of Prometheus, and which figures it has: what a pattern's group matches is its label."""

    pattern: str
    kind: Literal["Gauge", "Counter", "Histogram"]
    name: str
    help: str
    label: str | None = None


FAMILIES = (
    Metric("step", "Gauge", "rrfp_step", "Number of the latest step, from 0"),
    Metric("train/loss", "Gauge", "rrfp_loss", "Loss of the latest step, before its update"),
    Metric("train/gradient_norm", "Gauge", "rrfp_gradient_norm", "Norm of the gradient before clipping"),
    Metric("train/parameter_norm", "Gauge", "rrfp_parameter_norm", "Norm of the parameters"),
    Metric("train/loss_scale", "Gauge", "rrfp_loss_scale", "What the loss was multiplied by"),
    Metric("train/skipped", "Gauge", "rrfp_skipped_steps", "Steps of the run whose update was left out"),
    Metric("train/(.+)", "Gauge", "rrfp_metric", "A metric of the loss function", "name"),
    Metric("validation/loss", "Gauge", "rrfp_validation_loss", "Loss of the latest validation"),
    Metric("validation/(.+)", "Gauge", "rrfp_validation_metric", "A metric of it", "name"),
    Metric("hyperparams/(.+)", "Gauge", "rrfp_hyperparameter", "Of the latest step's update", "name"),
    Metric("speed/tokens_per_second", "Gauge", "rrfp_tokens_per_second", "Weight over the whole step's time"),
    Metric(
        "speed/step_seconds", "Histogram", "rrfp_step_seconds", "From the first task to the last one's end"
    ),
    Metric("speed/load_seconds", "Counter", "rrfp_load_seconds_total", "Seconds that steps waited for data"),
    Metric(r"idle/stage_(\d+)", "Gauge", "rrfp_stage_idle_ratio", "Share of a step without a task", "stage"),
    Metric(
        r"memory/stage_(\d+)_peak_bytes", "Gauge", "rrfp_stage_peak_bytes", "Most for microbatches", "stage"
    ),
)
"""In Prometheus' own units and endings; the first whose pattern matches a figure has it."""

STEP_SECONDS = (*(n * 10.0**power for power in range(-3, 3) for n in (1, 2, 5)), 1000.0)
"""Bounds of the histogram."""

UPDATES: Mapping[str, str] = {"Gauge": "set", "Counter": "inc", "Histogram": "observe"}
"""By kind, the method that takes a figure."""


def prometheus(port: int, address: str = "127.0.0.1") -> Logger:
    """For Prometheus, which asks the first process at `http://<address>:<port>/metrics`, from now on.

    Args:
        port: that it listens on, until `close`.
        address: of which of the machine's networks; by the default only this machine can ask, by "0.0.0.0"
            anybody.

    Raises:
        UsageError: the package prometheus_client is not there, or nothing can listen there.
    """
    package = imported("prometheus_client", "rrfp_jax.loggers.prometheus")
    where = f"loggers.prometheus: port={shown(port)}"
    if type(port) is not int or not 0 < port < 2**16:
        raise UsageError(f"{where}: give a number from 1 to 65535")

    def listen() -> Sink:
        registry = package.CollectorRegistry()
        made = {family.name: _metric(package, registry, family) for family in FAMILIES}
        try:
            server, thread = package.start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            reason = f"{where}, address={shown(address)}: {error.strerror}; give another port, or an address"
            raise UsageError(f"{reason} of this machine") from None

        def write(step: int, figures: Mapping[str, float]) -> None:
            for name, value in {"step": step, **figures}.items():
                family, labels = _family_of(name)
                metric = made[family.name].labels(*labels) if labels else made[family.name]
                getattr(metric, UPDATES[family.kind])(value)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return Sink(write, close)

    return Logger(lambda step: listen(), listen() if join().rank == 0 else None)


def _metric(package: Any, registry: Any, family: Metric) -> Any:
    options = {"buckets": STEP_SECONDS} if family.kind == "Histogram" else {}
    labels = [] if family.label is None else [family.label]
    return getattr(package, family.kind)(family.name, family.help, labels, registry=registry, **options)


def _family_of(figure: str) -> tuple[Metric, tuple[str, ...]]:
    """The family that has a figure, and its labels there."""
    found = ((family, re.fullmatch(family.pattern, figure)) for family in FAMILIES)
    return next((family, match.groups()) for family, match in found if match)
