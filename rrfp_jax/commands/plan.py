"""`rrfp plan --config=configs/gpt3_large.py --card=h100`: what a run would need, and how fast it would go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.commands.verbs import MEMORY_SHARE
from rrfp_jax.core.step_rules import bucket_name
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.forecast.devices import ACCELERATORS, LINKS, MEASURED, Accelerator, Link, accelerator_of_kind
from rrfp_jax.json_files import write_json
from rrfp_jax.report.explanation import as_text
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY

if TYPE_CHECKING:
    from rrfp_jax.forecast.forecast import Estimate, Forecast
    from rrfp_jax.runs.config import RunConfig

GIB, MIB = 2**30, 2**20

FIGURES = ("step_seconds", "makespan", "update_seconds", "bubble", "does_not_fit")
"""Of a forecast, that are written as they are."""


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    link = None if options.link is None else _link(options.link)
    from rrfp_jax.commands.overrides import config_of  # which imports JAX

    config = config_of(options.line)
    device = _accelerator(options.card, options.memory_share)
    memory = device.memory
    if memory is None and options.memory_share is not None:
        raise UsageError(
            f"--memory-share={options.memory_share}: device {device.name} has no limit on memory; "
            f"leave it out"
        )
    if memory is not None and device.name != MEASURED:  # which has what JAX takes
        memory = int(memory * (options.memory_share or MEMORY_SHARE))
    planned = plan_run(config, device.at(options.efficiency), link or LINKS[device.link], memory)
    if options.json is not None:
        write_json(options.json, planned.as_json_object(), indent=1)
    print_whole(str(planned))
    return DONE


def _accelerator(name: str | None, memory_share: float | None) -> Accelerator:
    """The accelerator of a name; without one, of this machine's device, of which JAX is to take a share."""
    import jax

    from rrfp_jax.forecast.cost_analysis import measured_accelerator
    from rrfp_jax.launcher.spawn import THREADS_FLAG

    if name in ACCELERATORS:
        jax.config.update("jax_platforms", "cpu")  # to be told of shapes; leaves GPUs to those who compute
        return ACCELERATORS[str(name)]
    ENVIRONMENT.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if memory_share is not None:
        ENVIRONMENT.pop(OLD_MEMORY, None)
        ENVIRONMENT[MEMORY] = str(memory_share)
    ENVIRONMENT["XLA_FLAGS"] = f"{ENVIRONMENT.get('XLA_FLAGS', '')} {THREADS_FLAG}=false".strip()
    device = jax.local_devices()[0]
    known = None if name == MEASURED or device.platform == "cpu" else accelerator_of_kind(device.device_kind)
    return known or measured_accelerator(device)


def _link(text: str) -> Link:
    if text in LINKS:
        return LINKS[text]
    try:
        rate, latency = map(float, text.split(","))
    except ValueError:
        rate = latency = -1.0
    if not (0 < rate < float("inf") and 0 <= latency < float("inf")):
        raise UsageError(f"--link={text}: choose one of {', '.join(LINKS)}, or BYTES_PER_SECOND,SECONDS")
    return Link(bytes_per_second=rate, latency=latency)


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
        is_same = self.own is not None and list(self.own.split) == list(self.suggested.split)
        parts = [
            self.headline,
            "" if self.own is None else self._told("split", self.own),
            "The suggested split is the same." if is_same else self._told("suggested split", self.suggested),
            "" if self.none_fits is None else self.none_fits[:1].upper() + self.none_fits[1:],
        ]
        return "\n\n".join(filter(None, parts))

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
        numbers = ["GFLOP"] if len(buckets) == 1 else [f"GFLOP {i}" for i in range(len(buckets))]
        rows = [
            [
                str(index),
                " ".join(f"{first}-{end - 1}" for first, end in stage.ledger.layers),
                f"{stage.ledger.parameters:,}",
                *(_three_digits(flops / 1e9) for flops in stage.flops),
                _seconds(stage.compute_seconds),
                f"{1 - stage.compute_seconds / forecast.makespan:.1%}",
                f"{stage.ledger.fixed_bytes / GIB:.2f} GiB",
                f"{stage.ledger.largest.held_bytes / MIB:,.1f} MiB",
                f"{stage.peak_bytes / GIB:.2f} GiB",
            ]
            for index, stage in enumerate(forecast.stages)
        ]
        head = ["stage", "layers", "parameters", *numbers, "compute", "idle", "fixed", "held", "peak"]
        names = [f"GFLOP {i}: {name}" for i, name in enumerate(buckets)] if len(buckets) > 1 else []
        _, _, table = as_text(160, [head, *rows]).partition("\n")  # the first line is blank
        return "\n".join([table, *names])


def plan_run(config: RunConfig, card: Accelerator, link: Link, memory: int | None) -> RunPlan:
    """Forecast a run's step, with its own split and with the one by cost."""
    from rrfp_jax.forecast.forecast import REMEDY, Devices, forecast  # these import JAX
    from rrfp_jax.forecast.partition import TooLarge
    from rrfp_jax.sim.planned import Planned

    if max(config.mesh.widths) > 1 or config.mesh.dp > 1:
        raise UsageError(
            f"mesh.tp={config.mesh.tp}, mesh.dp={config.mesh.dp}: a plan knows nothing yet of several "
            f"devices per stage, nor of replicas; give --config.mesh.tp=1 --config.mesh.dp=1"
        )
    run, shared = config.spec(), config.mesh.share_devices
    setting = run.settings.budget
    transport = None if shared or config.mesh.pp == 1 else run.settings.transport
    devices = Devices(
        accelerator=card, link=link, memory=memory, setting=setting, shared=shared, transport=transport
    )
    found, name = forecast(run, devices), config.schedule
    if found.choice is not None:
        name += f" ({found.choice})"
    elif isinstance(run.schedule, Planned):
        name += " (forecast by its base)"
    estimate = found.estimate
    own = None if isinstance(run.split, str) else estimate.forecast(run.split)
    none_fits = None
    try:
        suggested = estimate.suggested()
    except TooLarge as error:
        suggested, none_fits = estimate.forecast(error.split), f"{error}; {REMEDY}"
    headline = _headline(config, name, estimate)
    return RunPlan(headline=headline, estimate=estimate, own=own, suggested=suggested, none_fits=none_fits)


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
        **{name: getattr(forecast, name) for name in FIGURES},
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
