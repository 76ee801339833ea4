"""Initial parameters: from the layers themselves, from a user's function, or some of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.pipeline import LayerShapes, Pipeline

InitFunction: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], Any]
"""(path such as "3.attention.query", spec) -> array, or None for the layer's own initial value."""


def initial_params(
    pipe: Pipeline,
    layers: range,
    shapes: Sequence[LayerShapes],
    fields: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
    init: InitFunction | None,
    device: jax.Device,
) -> Params:
    """The parameters of some layers, {layer index as text: tree}, on a device.

    Values of a layer depend on (seed, layer index) only. A layer that `init` gives whole is not initialised
    by itself.

    Raises:
        UsageError: `init` gives an array of another shape or dtype than the parameter.
    """
    params = {}
    for i in layers:
        given = _from_user(init, i, shapes[i].params)
        own = given
        if not _complete(given):
            own = pipe.init_layer(i, seed, shapes[i], fields, device)
        # A copy of what the user gives, because updates donate parameters.
        params[str(i)] = jax.tree.map(
            lambda g, o: o if g is None else jnp.array(g, device=device, copy=True),
            given,
            own,
            is_leaf=lambda g: g is None,
        )
    return params


def leaf_path(layer: int | str, path: Sequence[Any]) -> str:
    """The name of a parameter: layer index, then the keys to the leaf, with dots."""
    return ".".join(filter(None, [str(layer), jax.tree_util.keystr(tuple(path), simple=True, separator=".")]))


def _from_user(init: InitFunction | None, layer: int, specs: Params) -> Any:
    """The leaves that the user's function gives, None elsewhere.

    Raises:
        UsageError: an array of another shape or dtype than the parameter.
    """

    def leaf(path: Any, spec: jax.ShapeDtypeStruct) -> Any:
        name = leaf_path(layer, path)
        value = init(name, spec) if init is not None else None
        got = (getattr(value, "shape", None), getattr(value, "dtype", type(value).__name__))
        if value is not None and got != (spec.shape, spec.dtype):
            raise UsageError(
                f"init({name!r}) gave {got[1]}{list(got[0] or ())}; the parameter is "
                f"{spec.dtype}{list(spec.shape)}"
            )
        return value

    return jax.tree_util.tree_map_with_path(leaf, specs)


def _complete(given: Any) -> bool:
    return all(leaf is not None for leaf in jax.tree.leaves(given, is_leaf=lambda leaf: leaf is None))
