"""`split="auto"`: which layers go to which stage, by predicted costs; the same on every process."""

from __future__ import annotations

from collections import Counter

import optax

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.data.contract import Data, buckets_of, declared_buckets, plan_step
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.costs import ModelCosts
from rrfp_jax.forecast.devices import CPU, LINKS, accelerator_of_kind
from rrfp_jax.forecast.estimate import Estimate
from rrfp_jax.forecast.forecast import Devices
from rrfp_jax.forecast.partition import TooLarge
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.topology import Layout, Mesh
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.sizes import in_words, memory_limit
from rrfp_jax.train.checks import check_order

AUTO = "auto"

REMEDY = "take more stages, smaller microbatches, remat='full' or a larger device"


def auto_split(
    pipe: Pipeline,
    optimizer: optax.GradientTransformation | None,
    data: Data | None,
    settings: Settings,
    mesh: Mesh,
    schedule: Schedule,
    layout: Layout,
) -> list[int]:
    """The split that `Estimate.suggested` finds for the first step.

    Nothing is measured: costs follow from the shapes of the first step and the data sheet of rank 0's first
    device, or a CPU's rates where that is not known, so all processes get the same. They ask together.

    Args:
        pipe, optimizer: to be run.
        data: whose first step is planned, not loaded.
        settings, mesh, schedule: of the Trainer.
        layout: where the stages are.

    Raises:
        UsageError: there is no data, or no split fits.
    """
    check_split_can_be_found(mesh)
    if data is None:
        raise UsageError("split='auto' goes by the shapes of a first step: give Trainer(..., data=...)")
    on = devices_of(layout, settings, "split='auto'")
    estimate = estimate_of(pipe, optimizer, data, settings, mesh, schedule, on)
    try:
        return list(estimate.suggested().split)
    except TooLarge as error:
        first = sum(error.split[: error.virtual_stage])
        last = first + error.split[error.virtual_stage] - 1
        raise UsageError(
            f"split='auto': no split fits: even the best leaves virtual stage {error.virtual_stage} "
            f"(layers {first} to {last}) with {in_words(error.bytes)} of {in_words(error.budget)}; {REMEDY}"
        ) from None


def check_split_can_be_found(mesh: Mesh) -> None:
    """Refuse to look for a split where stages have several devices, or replicas.

    Raises:
        UsageError: they do.
    """
    if max(mesh.widths) > 1 or mesh.dp > 1:
        raise UsageError(
            f"split='auto' with tp={mesh.tp}, dp={mesh.dp}: costs are predicted for one device per stage; "
            f"give the number of layers of each stage"
        )


def devices_of(layout: Layout, settings: Settings, what: str) -> Devices:
    """The devices of all processes by rank 0's first one, for predicting costs; they ask together.

    Args:
        layout: where the stages are.
        settings: of the Trainer.
        what: is predicted, for messages.
    """
    devices = [stage_mesh.device for stage_mesh in layout.stage_meshes.values()]
    sharing = max(Counter(devices).values())
    limits = [limit // sharing for device in devices if (limit := memory_limit(device)) is not None]
    found = layout.world.gather(f"the devices, for {what}", [devices[0].device_kind, limits])
    accelerator = accelerator_of_kind(found[0][0]) or CPU
    memory = min((limit for _, own in found for limit in own), default=None)
    return Devices(
        accelerator=accelerator,
        link=LINKS[accelerator.link],
        memory=memory,
        setting=settings.budget,
        transport=None if layout.world.size == 1 else settings.transport,
    )


def estimate_of(
    pipe: Pipeline,
    optimizer: optax.GradientTransformation | None,
    data: Data,
    settings: Settings,
    mesh: Mesh,
    schedule: Schedule,
    devices: Devices,
) -> Estimate:
    """The first step of one replica of a Trainer's with these arguments.

    Raises:
        UsageError: a model or a schedule that does not work.
    """
    buckets = buckets_of(plan_step(data, 0))[:: mesh.dp]
    if not devices.limited:
        settings = settings.limited(mesh.pp)
    rules = settings.rules(mesh.placement(schedule), len(buckets), schedule)
    check_order(rules)
    stages = range(mesh.pp)
    kinds = sorted({kind for s in stages for own in rules.backward_kinds(s) for kind in own})
    every = [*buckets, *declared_buckets(data)]
    model = ModelCosts.of(pipe, every, optimizer, kinds=kinds, remat=settings.remat)
    return Estimate(model=model, buckets=buckets, rules=rules, devices=devices)
