"""A model's parameters as flax itself has them, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.stage_mesh import transfers_meant
from rrfp_jax.runtime.model.layers import Params


def flax_states(layers: Sequence[Any], params: Params, modules: bool) -> list[Any]:
    """A state of each layer, or what can be called as it is; see `rrfp.export`.

    Args:
        layers: with their `kind`; for `modules` the model's own.
        params: of all of them, {layer index as text: nested dict} of NumPy arrays.
        modules: give what can be called.

    Raises:
        UsageError: JAX would make an array narrower.
    """
    with _on_host(), transfers_meant():
        arrays = [jax.tree.map(_array, params[str(index)]) for index in range(len(layers))]
    if modules:
        return [layer.fill(own) for layer, own in zip(layers, arrays, strict=True)]
    return [_state(layer.kind, own) for layer, own in zip(layers, arrays, strict=True)]


def _state(kind: str, params: Params) -> Any:
    """A layer's parameters as flax has them."""
    if kind == "nnx":
        from flax import nnx

        return nnx.State(params)
    if kind == "linen":
        from rrfp_jax.runtime.model.flax_layers import variables_of

        return variables_of(params)
    return params


def _on_host() -> Any:
    """Inside, arrays are made in the host's memory, without being bound to it."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS names others only
        return nullcontext()


def _array(leaf: np.ndarray[Any, Any]) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise UsageError(
            f"export: a parameter is {leaf.dtype}, which JAX makes narrower here; set jax_enable_x64 first"
        )
    return jnp.array(leaf)
