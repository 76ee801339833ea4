"""What a run would need and how fast it would go, from its config alone: abstract shapes, no weights."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rrfp_jax.core.step_rules import bucket_name
from rrfp_jax.data.contract import as_data
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.devices import Accelerator, Link
from rrfp_jax.forecast.estimate import Estimate
from rrfp_jax.forecast.forecast import Devices, Forecast
from rrfp_jax.forecast.partition import TooLarge
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned, base_of
from rrfp_jax.train.auto_schedule import predict
from rrfp_jax.train.auto_split import AUTO, REMEDY, estimate_of
from rrfp_jax.train.named import read_schedule

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run's prospects. Printed it is a table for its own split and one for the split suggested.

    Attributes:
        headline: what has been planned, in words.
        estimate: of a step.
        own: with the config's split; None if that is "auto".
        suggested: with the split by cost.
        none_fits: why that is only the best of those that are too large; None if it fits.
    """

    headline: str
    estimate: Estimate
    own: Forecast | None
    suggested: Forecast
    none_fits: str | None

    def as_json_object(self) -> dict[str, Any]:
        """All figures; seconds and bytes."""
        device, link = self.estimate.devices.accelerator, self.estimate.devices.link
        return {
            "run": self.headline,
            "card": {name: getattr(device, name) for name in ("name", "half", "single", "bytes_per_second")},
            "link": {"bytes_per_second": link.bytes_per_second, "latency": link.latency},
            "shared": self.estimate.devices.shared,
            "device_bytes": self.estimate.devices.memory,
            "own": None if self.own is None else _plain(self.own),
            "suggested": _plain(self.suggested),
            "none_fits": self.none_fits,
        }

    def __str__(self) -> str:
        parts = [self.headline]
        if self.own is not None:
            parts += [self._told("split", self.own)]
        if self.own is None or list(self.own.split) != list(self.suggested.split):
            parts += [self._told("suggested split", self.suggested)]
        else:
            parts += ["The suggested split is the same."]
        if self.none_fits is not None:
            parts += [f"No split into these virtual stages fits: {self.none_fits}"]
        return "\n\n".join(parts)

    def _told(self, name: str, forecast: Forecast) -> str:
        memory, peak = self.estimate.devices.memory, forecast.peak_bytes
        flops = sum(stage.flops_of_step for stage in forecast.stages)
        rate = flops / forecast.step_seconds / len(forecast.devices) / 1e12
        lines = [
            f"{name} {_runs(forecast.split)}",
            self._table(forecast),
            f"step {_seconds(forecast.step_seconds)}, of which {_seconds(forecast.update_seconds)} for the "
            f"update; {forecast.bubble:.1%} idle; {rate:.3g} TFLOP/s a device; at most {peak / GIB:.2f} "
            "GiB on a device" + ("" if memory is None else f", which gives {memory / GIB:.2f} GiB"),
        ]
        if forecast.does_not_fit is not None:
            lines.append(f"DOES NOT FIT: {forecast.does_not_fit}")
        return "\n".join(lines)

    def _table(self, forecast: Forecast) -> str:
        buckets = [bucket_name(bucket) for bucket in self.estimate.distinct]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        flops = ["GFLOP"] if len(buckets) == 1 else [f"GFLOP {i}" for i in range(len(buckets))]
        for column in ("stage", "layers", "parameters", *flops, "compute", "idle", "fixed", "held", "peak"):
            table.add_column(column, justify="right")
        for index, stage in enumerate(forecast.stages):
            ledger = stage.ledger
            table.add_row(
                str(index),
                " ".join(f"{first}-{end - 1}" for first, end in ledger.layers),
                f"{ledger.parameters:,}",
                *(_three_digits(flops / 1e9) for flops in stage.flops),
                _seconds(stage.compute_seconds),
                f"{1 - stage.compute_seconds / forecast.makespan:.1%}",
                f"{ledger.fixed_bytes / GIB:.2f} GiB",
                f"{ledger.largest.held_bytes / MIB:,.1f} MiB",
                f"{stage.peak_bytes / GIB:.2f} GiB",
            )
        text = io.StringIO()
        Console(file=text, width=160).print(table)
        if len(buckets) > 1:
            text.write("".join(f"GFLOP {i}: {name}\n" for i, name in enumerate(buckets)))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def plan_run(config: RunConfig, accelerator: Accelerator, link: Link, memory: int | None) -> RunPlan:
    """Forecast a run's step, with its own split and with the one by cost.

    Args:
        config: of the run; its data is planned, not loaded.
        accelerator, link: every stage's device, and what is between neighbours; with `mesh.share_devices` the
            one device of all.
        memory: bytes that each device gives; None if that is not known.

    Raises:
        UsageError: a run that could not work.
    """
    if max(config.mesh.widths) > 1 or config.mesh.dp > 1:
        raise UsageError(
            f"mesh.tp={config.mesh.tp}, mesh.dp={config.mesh.dp}: a plan knows nothing yet of several "
            f"devices per stage, nor of replicas; give --config.mesh.tp=1 --config.mesh.dp=1"
        )
    schedule = read_schedule(config.schedule)
    settings, shared = config.settings, config.mesh.share_devices
    alone = shared or config.mesh.pp == 1
    devices = Devices(
        accelerator=accelerator,
        link=link,
        memory=memory,
        setting=settings.budget,
        shared=shared,
        transport=None if alone else settings.transport,
    )
    model, data = (config.made("pipeline"), config.made("optimizer")), as_data(config.made("train_data"))
    given, name = config.layers_per_virtual_stage, config.schedule
    if isinstance(schedule, Auto):
        found = predict(schedule, *model, data, settings, config.mesh, given, devices)
        estimate, name = found.estimate, f"{name} ({found.choice})"
    else:
        estimate = estimate_of(*model, data, settings, config.mesh, base_of(schedule), devices)
        name += " (forecast by its base)" if isinstance(schedule, Planned) else ""
    own = None if given == AUTO else estimate.forecast(given)
    suggested, none_fits = _suggested(estimate)
    return RunPlan(
        headline=_headline(config, name, estimate),
        estimate=estimate,
        own=own,
        suggested=suggested,
        none_fits=none_fits,
    )


def _suggested(estimate: Estimate) -> tuple[Forecast, str | None]:
    try:
        return estimate.suggested(), None
    except TooLarge as error:
        return estimate.forecast(error.split), f"{error}; {REMEDY}"


def _headline(config: RunConfig, schedule: str, estimate: Estimate) -> str:
    placement, device, link = estimate.rules.placement, estimate.devices.accelerator, estimate.devices.link
    chunks = "" if placement.chunks == 1 else f" of {placement.chunks} chunks"
    cores = "" if device.together is None else f"; {device.together} compute at the same time"
    between = f"link {link.bytes_per_second / 1e9:.4g} GB/s, {link.latency * 1e6:.0f} us"
    if estimate.devices.shared:
        cores, between = "", "all stages share one, in turn"
    layers, parameters = len(estimate.model.states), estimate.model.parameters
    return (
        f"{config.name}: {layers} layers, {parameters:,} parameters, on {placement.stages} stages{chunks}, "
        f"schedule {schedule}, {estimate.rules.microbatches} microbatches a step\n"
        f"device {device.name} ({device.source}): {device.half / 1e12:.3g} TFLOP/s in half precision, "
        f"{device.single / 1e12:.3g} in float32, {device.bytes_per_second / 1e9:.4g} GB/s{cores}; {between}"
    )


def _plain(forecast: Forecast) -> dict[str, Any]:
    return {
        "split": list(forecast.split),
        "step_seconds": forecast.step_seconds,
        "makespan": forecast.makespan,
        "update_seconds": forecast.update_seconds,
        "bubble": forecast.bubble,
        "does_not_fit": forecast.does_not_fit,
        "stages": [
            {
                "layers": list(stage.ledger.layers),
                "parameters": stage.ledger.parameters,
                "flops": dict(zip(stage.ledger.buckets, stage.flops, strict=True)),
                "compute_seconds": stage.compute_seconds,
                "peak_bytes": stage.peak_bytes,
                "ledger": stage.ledger.plain(),
            }
            for stage in forecast.stages
        ],
    }


def _runs(split: Sequence[int]) -> str:
    """2,1,1,1,2 as "2, 1 (3 times), 2"."""
    runs = [(size, len(list(own))) for size, own in groupby(split)]
    return ", ".join(f"{size}" if times == 1 else f"{size} ({times} times)" for size, times in runs)


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(time: float) -> str:
    return f"{time:.3f} s" if time >= 1 else f"{time * 1e3:.2f} ms"
