"""All parameters of a model in every process, also as flax itself has them, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.checkpoint.leaves import PARAMETERS, Key, Place, filled, keyed, shards_to_write
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.mesh.stage_mesh import transfers_meant
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.train.snapshot import leaves_of


def whole_params(engine: Engine) -> Params:
    """Those of a started engine, {layer index as text: tree}, on the host; a layer at a time."""
    first = engine.layout.stages  # further stage replicas are of other replicas, which are alike
    stages = [stage for number, stage in engine.stages.items() if number < first]
    mine = dict(leaves_of(stages, []))
    found = {}
    for layer, specs in engine.library.params.items():
        wanted = keyed(specs, PARAMETERS, layer)
        own = [_told(mine, key) for key, _ in wanted]
        parts = engine.world.gather(f"the parameters of layer {layer}", own, START_SECONDS)
        arrays = {
            key: _joined(spec, [part for rank in parts for part in rank[i]])
            for i, (key, spec) in enumerate(wanted)
        }
        found[layer] = filled(specs, arrays, PARAMETERS, layer)
    return found


def _told(mine: Mapping[Key, jax.Array], key: Key) -> list[tuple[Place, Any, Any]]:
    """This process's parts of an array as plain data: place, shape and bytes."""
    leaf = mine.get(key)
    parts = {} if leaf is None else shards_to_write(leaf)
    return [(place, part.shape, np.asarray(part).tobytes()) for place, part in parts.items()]


def _joined(spec: jax.ShapeDtypeStruct, parts: list[Any]) -> np.ndarray[Any, Any]:
    """An array from all its parts."""
    array = np.empty(spec.shape, spec.dtype)
    for place, shape, content in parts:
        cut = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, shape, strict=True))
        array[cut] = np.frombuffer(content, spec.dtype).reshape(shape)
    return array


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
