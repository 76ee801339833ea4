"""`schedule="auto"`: the hint, and with it the placement, by predicted costs before the first step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import optax

from rrfp_jax.core.hints import Hint
from rrfp_jax.core.tasks import BACKWARD, INPUT, WEIGHT, Placement
from rrfp_jax.data.contract import Data, buckets_of, declared_buckets, plan_step
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.costs import ModelCosts
from rrfp_jax.forecast.estimate import Estimate
from rrfp_jax.forecast.forecast import Devices
from rrfp_jax.forecast.partition import TooLarge
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.topology import Layout, Mesh
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.sim.choice import Auto, Candidate, Choice, choose
from rrfp_jax.train.auto_split import AUTO, check_split_can_be_found, devices_of


@dataclass(frozen=True)
class Predicted:
    """A hint that was chosen by predicted costs.

    Attributes:
        choice: which, and why.
        hint: itself.
        split: layers per virtual stage; None for an even split.
        estimate: of the step with it.
    """

    choice: Choice
    hint: Hint
    split: Sequence[int] | None
    estimate: Estimate


def auto_schedule(
    auto: Auto,
    pipe: Pipeline,
    optimizer: optax.GradientTransformation | None,
    data: Data | None,
    settings: Settings,
    mesh: Mesh,
    split: Sequence[int] | str | None,
    layout: Layout,
) -> tuple[Hint, Sequence[int] | None]:
    """The hint for a Trainer with these arguments, and the split that it was chosen with.

    All processes ask together. Rank 0 chooses, tells the others, and says so in one line.

    Raises:
        UsageError: there is no data, or no candidate can run; with each one's reason.
    """
    if data is None:
        raise UsageError("schedule='auto' goes by the shapes of a first step: give Trainer(..., data=...)")
    devices = _of_stages(devices_of(layout, settings, "schedule='auto'"), mesh, layout)
    world, told, failure = layout.world, None, None
    if world.rank == 0:
        began = perf_counter()
        try:
            found = predict(auto, pipe, optimizer, data, settings, mesh, split, devices)
            told = [found.choice.name, found.split]
            say(f"schedule auto: {found.choice}; predicted in {perf_counter() - began:.1f} s")
        except UsageError as error:
            told, failure = [None, str(error)], error
    name, of_it = world.gather("the choice of schedule='auto'", told, START_SECONDS)[0]
    if name is None:
        raise failure or UsageError(of_it)
    return auto.hints[name], of_it


def predict(
    auto: Auto,
    pipe: Pipeline,
    optimizer: optax.GradientTransformation | None,
    data: Data,
    settings: Settings,
    mesh: Mesh,
    split: Sequence[int] | str | None,
    devices: Devices,
) -> Predicted:
    """The choice for the first step on some devices; nothing is measured or compiled.

    Args:
        auto: with the candidates.
        pipe, optimizer, data, settings, mesh: of the Trainer.
        split: "auto" to find one for each placement.
        devices: of the stages. One that is several devices counts as one that is so many times as fast.

    Raises:
        UsageError: a model that does not work, or no candidate can run.
    """
    if split == AUTO:
        check_split_can_be_found(mesh)
    buckets = buckets_of(plan_step(data, 0))[:: mesh.dp]  # of one replica
    if not devices.limited:
        settings = settings.limited(mesh.pp)
    kinds, every = [BACKWARD, INPUT, WEIGHT], [*buckets, *declared_buckets(data)]
    model = ModelCosts.of(pipe, every, optimizer, kinds=kinds, remat=settings.remat)
    splits: dict[Placement, Sequence[int] | None] = {}
    estimates: dict[str, Estimate] = {}
    candidates: dict[str, Candidate | str] = {}
    for name, hint in auto.hints.items():
        try:
            rules = settings.rules(mesh.placement(hint), len(buckets), hint)
            one = Estimate(model=model, buckets=buckets, rules=rules, devices=devices)
            if rules.placement not in splits:
                splits[rules.placement] = _split(one, split)
            candidates[name] = one.candidate(splits[rules.placement])
            estimates[name] = one
        except (UsageError, TooLarge, ValueError) as error:
            candidates[name] = str(error)
    try:
        choice = choose(candidates)
    except ValueError as error:
        raise UsageError(f"schedule='auto': {error}") from None
    estimate = estimates[choice.name]
    return Predicted(choice, auto.hints[choice.name], splits[estimate.rules.placement], estimate)


def _split(estimate: Estimate, given: Sequence[int] | str | None) -> Sequence[int] | None:
    return list(estimate.suggested().split) if isinstance(given, str) else given


def _of_stages(devices: Devices, mesh: Mesh, layout: Layout) -> Devices:
    """With a stage of several devices as one, and only as many stages at once as can compute."""
    width, cores = min(mesh.widths), len(os.sched_getaffinity(0))
    sharing = max(Counter(stage_mesh.device for stage_mesh in layout.stage_meshes.values()).values())
    together = max(1, mesh.pp // sharing)
    if devices.accelerator.name == "cpu":
        together = min(together, cores)
    accelerator = replace(devices.accelerator.at(width), together=together)
    memory, setting = devices.memory, devices.setting
    return replace(
        devices,
        accelerator=accelerator,
        memory=None if memory is None else width * memory,
        setting=width * setting if isinstance(setting, int) else setting,
    )
