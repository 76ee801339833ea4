"""A logger for Prometheus, which asks for the metrics of the latest step.

Start it with `rrfp train --config=prometheus.py --config.port=9090 --config.steps=100000`, and meanwhile ask
it with `curl localhost:9090/metrics`. The run is a small one, to show the logger. `prometheus(port)` is a
logger for any other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

import rrfp_jax as rrfp
from rrfp_jax.errors import imported
from rrfp_jax.loggers import Logger, Sink
from rrfp_jax.train.report import Evaluation, Report


@dataclass(frozen=True, kw_only=True)
class Watched(rrfp.RunConfig):
    """A small run, whose metrics can be asked for."""

    port: int = 9090

    def pipeline(self) -> rrfp.Pipeline:
        """See `RunConfig`."""
        return rrfp.Pipeline([rrfp.layer(dense, init=init, repeat=2)], loss)

    def optimizer(self) -> optax.GradientTransformation:
        """See `RunConfig`."""
        return optax.sgd(0.1)

    def train_data(self) -> Any:
        """See `RunConfig`."""
        return lambda step: [{"x": np.random.default_rng((step, j)).normal(size=(8, 4))} for j in range(4)]

    @functools.cached_property
    def logger(self) -> Logger:
        """Listens from the first step on."""
        return prometheus(self.port)

    def on_step(self, report: Report) -> None:
        """See `RunConfig`."""
        self.logger.on_step(report)

    def on_validation(self, report: Report, evaluation: Evaluation) -> None:
        """See `RunConfig`."""
        self.logger.on_validation(report, evaluation)


def get_config() -> Watched:
    """The settings of the run."""
    return Watched(name="watched", steps=20, mesh=rrfp.Mesh(pp=2))


def init(key: jax.Array) -> Any:
    """Initial parameters of a layer."""
    return {"w": jax.random.normal(key, (4, 4))}


def dense(params: Any, x: Any, mb: Any) -> Any:
    """A layer."""
    return (mb["x"] if x is None else x) @ params["w"]


def loss(x: Any, mb: Any) -> rrfp.Loss:
    """How far the two layers are from giving their input back."""
    return rrfp.Loss(((x - mb["x"]) ** 2).sum(), weight=x.size)


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
    package = imported("prometheus_client", "examples/prometheus.py")
    where = f"prometheus: port={port!r}"
    if type(port) is not int or not 0 < port < 2**16:
        raise rrfp.UsageError(f"{where}: give a number from 1 to 65535")

    def listen() -> Sink:
        registry = package.CollectorRegistry()
        made = {family.name: _metric(package, registry, family) for family in FAMILIES}
        try:
            server, thread = package.start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            reason = f"{where}, address={address!r}: {error.strerror}; give another port, or an address"
            raise rrfp.UsageError(f"{reason} of this machine") from None

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

    return Logger(lambda step: listen(), at_once=True)


def _metric(package: Any, registry: Any, family: Metric) -> Any:
    options = {"buckets": STEP_SECONDS} if family.kind == "Histogram" else {}
    labels = [] if family.label is None else [family.label]
    return getattr(package, family.kind)(family.name, family.help, labels, registry=registry, **options)


def _family_of(figure: str) -> tuple[Metric, tuple[str, ...]]:
    """The family that has a figure, and its labels there."""
    found = ((family, re.fullmatch(family.pattern, figure)) for family in FAMILIES)
    return next((family, match.groups()) for family, match in found if match)
