"""What a model's layers have to do, as reports need it to tell a slow stage from one with more to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from rrfp_jax.core.step_rules import Bucket
from rrfp_jax.core.tasks import BACKWARD
from rrfp_jax.forecast.costs import LayerCost, layer_costs
from rrfp_jax.forecast.devices import CPU, Accelerator, accelerator_of_kind
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.mesh.stage_mesh import tracing_alone
from rrfp_jax.runtime.programs.gradients import wide
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.trace.layers import LayerWork, Work

SAME = 1.05
"""The last layer has the loss as well. It is called as others of its name if that adds no more than this."""


def layer_work(engine: Engine, split: Sequence[int], buckets: Sequence[Bucket], remat: str) -> Work | None:
    """Of an engine's model, for one microbatch of the bucket that most have; None if it cannot be analysed.

    Each distinct layer is traced and lowered once. Nothing is compiled.

    Args:
        engine: of the model.
        split: of the steps that ran.
        buckets: of the microbatches of a step.
        remat: see `autodiff/residuals.py`.
    """
    bucket, _ = Counter(buckets).most_common(1)[0]
    library = engine.library
    shapes, flow = library.examine(bucket), library.flow(bucket).borders  # which it knows
    try:
        with tracing_alone():
            costs = layer_costs(engine.pipe, bucket, shapes, library.roles, flow, {BACKWARD}, remat)
    except Exception:  # whatever it is: the model trains, and its report does without
        return None
    kind = next(iter(engine.layout.stage_meshes.values())).device.device_kind
    device = accelerator_of_kind(kind) or CPU
    names = [spec.name for spec in engine.pipe.layers]
    seconds = [_estimate(cost, device) for cost in costs]
    alike = [n for n, name in zip(seconds[:-1], names[:-1], strict=True) if name == names[-1]]
    if alike and seconds[-1] > SAME * max(alike):
        names[-1] += " and loss"
    lasting = _lasting_bytes(engine)
    layers = [
        LayerWork(name, n, cost.footprint.held_after_forward_bytes, lasting.get(i, 0))
        for i, (name, n, cost) in enumerate(zip(names, seconds, costs, strict=True))
    ]
    return Work(layers, split)


def _lasting_bytes(engine: Engine) -> dict[int, int]:
    """By layer what lasts on each device, where that leaves less room for microbatches; else nothing."""
    if engine.spec.settings.budget != "auto" or not engine.memory.limited:
        return {}
    params, roles, width = engine.library.params, engine.library.roles, max(engine.layout.widths)
    found = {}
    for layer, own in params.items():
        leaves = jax.tree.leaves(own)
        sums = [wide(leaves[i]) for i in roles.leaves({layer: own}).trained]
        found[int(layer)] = nbytes(leaves) + nbytes(sums)
    if engine.spec.optimizer is not None:
        whole, _ = engine.staging.optimizer_parts
        for k, (_, spec) in enumerate(whole.state):
            if (of := whole.layer_of(k)) >= 0:
                found[of] += nbytes(spec)
    return {layer: size // width for layer, size in found.items()}


def _estimate(cost: LayerCost, device: Accelerator) -> float:
    return sum(device.seconds(program.flops, program.bytes) for program in cost.programs.values())
