"""Training that would be silently wrong, found before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.dataflow import output_dependence
from rrfp_jax.runtime.initial import leaf_path
from rrfp_jax.runtime.layers import Loss, MicrobatchView, Params
from rrfp_jax.runtime.pipeline import IDS, Pipeline
from rrfp_jax.runtime.programs import nbytes

LARGEST_LOSS_CHECK = 2**30
"""Bytes of logits and fields up to which the loss is tried out on two rows at start."""


def check_optimizer(optimizer: optax.GradientTransformation, params: Params, stages: Sequence[range]) -> None:
    """Refuse an optimizer in which one stage's update depends on another stage's gradient.

    Each stage updates its own parameters by itself, so such an optimizer would silently do something else
    than on one device. `optimizer.update` is traced on the whole model's specs and its dataflow followed.

    Args:
        optimizer: any optax transformation.
        params: specs of the whole model, {layer index as text: nested dict}.
        stages: layer indices per stage.

    Raises:
        UsageError: naming an update and a gradient of another stage that it depends on.
    """
    stage_of = {str(i): s for s, layers in enumerate(stages) for i in layers}
    paths = jax.tree_util.tree_leaves_with_path(params)
    owners = [stage_of[path[0].key] for path, _ in paths]
    state = jax.eval_shape(optimizer.init, params)
    closed = jax.make_jaxpr(optimizer.update)(params, state, params)
    masks = output_dependence(closed)
    for output, mask in enumerate(masks):
        read = [i for i in range(len(owners)) if mask >> i & 1]
        own = owners[output] if output < len(owners) else None  # then comes the optimizer's state
        foreign = [i for i in read if owners[i] != (owners[read[0]] if own is None else own)]
        if foreign:
            what = f"the update of {_name(paths[output][0])}" if own is not None else "the optimizer's state"
            raise UsageError(
                f"optimizer: {what} depends on the gradient of {_name(paths[foreign[0]][0])}, which is on "
                f"another stage, so stages could not update by themselves. To clip by the global norm "
                f"(optax.clip_by_global_norm) use Trainer(clip_norm=...): its norm is over all stages"
            )


def check_loss_is_a_sum(pipe: Pipeline, carry: Any, fields: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Refuse a loss that is a mean: the loss of two rows together must be the sum of the two apart.

    Args:
        pipe: whose loss is called, with random numbers of the carry's specs.
        carry: specs of what the last layer gives.
        fields: the arrays of one microbatch; rows are counted along the first axis.

    Not done where two rows take more than `LARGEST_LOSS_CHECK` bytes, nor for `Pipeline(additive=False)`.

    Raises:
        UsageError: the total or the weight does not add up.
    """
    leaves = [leaf for leaf in jax.tree.leaves((carry, dict(fields))) if leaf.shape]
    if not pipe.additive or not leaves:
        return
    rows = leaves[-1].shape[0]
    if sum(2 * nbytes(leaf) // leaf.shape[0] for leaf in leaves) > LARGEST_LOSS_CHECK:
        return
    second = min(1, rows - 1)
    apart = [_loss_of_rows(pipe, carry, fields, rows, [row]) for row in (0, second)]
    together = _loss_of_rows(pipe, carry, fields, rows, [0, second])
    for name in ("total", "weight"):
        whole = float(getattr(together, name))
        parts = sum(float(getattr(loss, name)) for loss in apart)
        if np.isfinite(whole) and abs(whole - parts) > 1e-3 * max(abs(whole), abs(parts), 1e-6):
            raise UsageError(
                f"the loss is not a sum: Loss.{name} of two rows together is {whole:.6g}, but {parts:.6g} "
                f"for the two apart. Return sums, not means: rrfp.Loss(values.sum(), weight=count); a step "
                f"divides by the summed weight itself. If rows are coupled on purpose: "
                f"Pipeline(..., additive=False)"
            )


def _loss_of_rows(pipe: Pipeline, carry: Any, fields: Any, rows: int, chosen: Sequence[int]) -> Loss:
    """The loss of rows 0 and 1, or one of them, at random values of the carry."""
    random = np.random.default_rng(0)

    def of_carry(spec: Any) -> Any:
        if not _has_rows(spec, rows):
            return jnp.asarray(random.standard_normal(spec.shape), spec.dtype)
        return jnp.asarray(random.standard_normal((2, *spec.shape[1:]), np.float32)[chosen], spec.dtype)

    def of_field(array: Any) -> Any:
        return jnp.asarray(np.asarray(array)[chosen] if _has_rows(array, rows) else array)

    mb = MicrobatchView(
        {k: of_field(v) for k, v in fields.items()}, jnp.zeros(IDS.shape, IDS.dtype), len(pipe)
    )
    return pipe.apply_loss(jax.tree.map(of_carry, carry), mb)


def _has_rows(leaf: Any, rows: int) -> bool:
    return len(leaf.shape) > 0 and leaf.shape[0] == rows


def _name(path: Sequence[Any]) -> str:
    return leaf_path(str(path[0].key), path[1:])
