"""Plain, unpipelined JAX as the reference: one device, one `jax.value_and_grad` per microbatch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.runtime.memory.ledger import BucketLedger, StageLedger
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.paths import leaf_path, leaf_paths
from rrfp_jax.runtime.model.pipeline import Pipeline, run_layers
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.programs.stage_mesh import tracing_alone

LEAF_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-6


@dataclass(frozen=True)
class CheckReport:
    """A step against unpipelined JAX, and what each stage needs.

    Attributes:
        loss: the pipeline's loss.
        loss_error: its relative difference from the reference.
        leaf_errors: per parameter, max|g - reference| / max|reference|.
        stages: bytes per stage.
    """

    loss: float
    loss_error: float
    leaf_errors: Mapping[str, float]
    stages: Sequence[StageLedger]

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most, and by how much."""
        return max(self.leaf_errors.items(), key=lambda item: item[1], default=("none", 0.0))

    def of_all(self, leaf_errors: Sequence[Mapping[str, float]]) -> CheckReport:
        """The same with what every process has found of its parameters."""
        return replace(self, leaf_errors={k: v for own in leaf_errors for k, v in own.items()})

    @property
    def ok(self) -> bool:
        """Whether loss and gradients agree within what float32 allows (1e-6 and 1e-5)."""
        return self.loss_error <= LOSS_TOLERANCE and self.worst[1] <= LEAF_TOLERANCE

    def __str__(self) -> str:
        name, error = self.worst
        verdict = "agrees with" if self.ok else "DIFFERS FROM"
        return (
            f"one step {verdict} unpipelined JAX: loss {self.loss:.6f}, relative difference "
            f"{self.loss_error:.1e}; gradients of {len(self.leaf_errors)} parameters, "
            f"worst {error:.1e} ({name})\n{stage_table(self.stages)}"
        )


def stage_table(stages: Sequence[StageLedger]) -> str:
    """What each stage needs, as text; of its largest bucket.

    "gradients" are their sums; "parked" those that wait to be added; "held", "for W" (between the halves of
    a split backward) and "sent" are per microbatch in flight; "temporary" is the largest program's.
    """
    head = (
        *("stage", "layers", "device", "parameters", "weights", "optimizer", "gradients", "parked"),
        *("prepared", "held", "for W", "sent", "temporary", "compile"),
    )
    rows = [
        (
            str(index),
            " ".join(f"{first}-{end - 1}" for first, end in s.layers),
            s.device.partition(" of ")[0],
            f"{s.parameters:,}",
            *map(in_mib, (s.weight_bytes, s.optimizer_bytes, s.accumulator_bytes, s.parked_gradient_bytes)),
            *map(in_mib, _of_microbatch(s.largest)),
            f"{s.compile_seconds:.1f} s",
        )
        for index, s in enumerate(stages)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[cell.rjust(w) for cell, w in zip(row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join(map("  ".join, lines))


def _of_microbatch(bucket: BucketLedger) -> tuple[int, ...]:
    """Prepared, held, for W, sent, temporary."""
    chunks = bucket.chunks
    return (
        bucket.prepared_bytes,
        bucket.held_bytes,
        sum(chunk.held_after_input_bytes for chunk in chunks),
        max(max(chunk.activation_out_bytes, chunk.gradient_out_bytes) for chunk in chunks),
        max(size for chunk in chunks for size in chunk.temporary_bytes.values()),
    )


def in_mib(size: int) -> str:
    """A number of bytes in MiB."""
    return f"{size / 2**20:.1f} MiB"


def compare(
    pipe: Pipeline,
    params: Params,
    microbatches: Sequence[Mapping[str, Any]],
    numbers: tuple[int, int],
    loss: float,
    gradient: Params,
    stages: Sequence[StageLedger],
) -> CheckReport:
    """Hold a pipelined loss and gradient against unpipelined ones; `numbers` are seed and step.

    The gradient may be that of some layers only.
    """
    expected_loss, expected = unpipelined_value_and_grad(pipe, params, microbatches, *numbers)
    return CheckReport(loss, relative(loss, expected_loss), leaf_errors(gradient, expected), stages)


def relative(value: float, expected: float) -> float:
    """How far a number is from what was expected, as a share of that."""
    return abs(value - expected) / max(abs(expected), 1e-30)


def leaf_errors(gradient: Params, expected: Params) -> dict[str, float]:
    """Per parameter, max|g - expected| / max|expected|; infinite where something is not a number.

    The gradient may be that of some layers only; of spread arrays, what is in this process is compared.
    """
    expected = {layer: expected[layer] for layer in gradient}
    paths = jax.tree_util.tree_leaves_with_path(jax.device_get(expected))
    errors = {}
    for (path, reference), got in zip(paths, map(jnp.asarray, jax.tree.leaves(gradient)), strict=True):
        scale = float(np.max(np.abs(reference), initial=0.0)) or 1.0
        error = max(_difference(shard, reference) for shard in got.addressable_shards) / scale
        errors[leaf_path(path[0].key, path[1:])] = math.inf if math.isnan(error) else error
    return errors


def _difference(shard: Any, reference: Any) -> float:
    """The largest between a part of an array and the same part of another."""
    own = np.asarray(shard.data).astype(np.float64)
    return float(np.max(np.abs(own - reference[shard.index]), initial=0.0))


def unpipelined_value_and_grad(
    pipe: Pipeline, params: Params, microbatches: Sequence[Mapping[str, Any]], seed: int, step: int
) -> tuple[float, Params]:
    """Loss and gradient of all microbatches on the first local device, by `jax.value_and_grad`.

    The gradient has no frozen parameters; tied ones are one argument of the function that is differentiated.
    """
    layers = range(len(pipe))
    roles = Roles.of(params, pipe.frozen, pipe.tied)
    places, paths = roles.leaves(params), leaf_paths(params)
    first = {path: place for place, path in enumerate(paths)}
    source = [first[roles.owners.get(path, path)] for path in paths]  # where each leaf has its value from
    local = jax.device_put(jax.tree.leaves(params), jax.local_devices()[0])

    def total(owned: Sequence[Any], leaves: Sequence[Any], fields: Any, ids: Any) -> tuple[Any, Any]:
        values = {**dict(enumerate(leaves)), **dict(zip(places.owned, owned, strict=True))}
        tree = jax.tree.unflatten(places.structure, [values[place] for place in source])
        _, loss = run_layers(pipe, layers, [tree[str(i)] for i in layers], None, fields, ids)
        assert loss is not None
        return loss.total, loss.weight

    step_function = jax.jit(jax.value_and_grad(total, has_aux=True))
    owned = [local[place] for place in places.owned]
    value, weight, sums = 0.0, 0.0, [_wide_zeros(leaf) for leaf in owned]
    for j, fields in enumerate(microbatches):
        ids = jnp.array([seed, step, j], jnp.uint32)
        with tracing_alone():
            (part, count), grads = step_function(owned, local, dict(fields), ids)
        value, weight = value + float(part), weight + float(count)
        sums = [a + g for a, g in zip(sums, grads, strict=True)]
    gradient = {place: g / weight for place, g in zip(places.owned, sums, strict=True)}
    return value / weight, places.trained_tree([gradient[source[place]] for place in places.trained])


def _wide_zeros(leaf: Any) -> jax.Array:
    """Where gradients are summed: in float32 at least, as the pipeline does."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
