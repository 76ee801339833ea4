"""Layers in a row as one pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp

from rrfp_jax.runtime.autodiff.remat import NONE, rematerialised
from rrfp_jax.runtime.model.layers import Loss, MicrobatchView, Params
from rrfp_jax.runtime.model.metrics import joined, kinds_of
from rrfp_jax.runtime.model.pipeline import Pipeline


def add_losses(losses: Sequence[Loss]) -> Loss | None:
    """The sum of several terms, or None if there are none."""
    if not losses:
        return None
    given = {
        name: [loss.metrics[name] for loss in losses if name in loss.metrics]
        for name in kinds_of(loss.metrics for loss in losses)
    }
    return Loss(
        _sum([loss.total for loss in losses]),
        _sum([loss.weight for loss in losses]),
        {name: joined(metrics, _sum, _largest) for name, metrics in given.items()},
    )


def _sum(values: Sequence[Any]) -> Any:
    """In float32, or float64 if a value has it."""
    real = jnp.result_type(jnp.float32, *values)
    return sum(jnp.asarray(value).astype(real) for value in values)


def _largest(values: Sequence[Any]) -> Any:
    return reduce(jnp.maximum, (_sum([value]) for value in values))


def run_layers(
    pipe: Pipeline,
    layers: range,
    params: Sequence[Params],
    carry: Any,
    fields: Mapping[str, Any],
    ids: Any,
    *,
    training: bool = True,
    remat: str = NONE,
) -> tuple[Any, Loss | None]:
    """Layers in a row, and the loss if they reach the end of the model (the carry is then None).

    Raises:
        UsageError: `remat` is no name that `rematerialised` knows.
    """
    losses = []
    for index, own in zip(layers, params, strict=True):
        layer = rematerialised(partial(pipe.apply_layer, index), remat)
        carry, term = layer(own, carry, MicrobatchView(fields, ids, index, training))
        losses += [] if term is None else [term]
    if layers.stop == len(pipe):
        losses.append(pipe.apply_loss(carry, MicrobatchView(fields, ids, len(pipe), training)))
        carry = None
    return carry, add_losses(losses)
