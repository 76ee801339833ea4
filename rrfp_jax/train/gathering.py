"""All parameters of a model in every process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rrfp_jax.checkpoint.leaves import PARAMETERS, Key, filled, keyed
from rrfp_jax.checkpoint.parts import Place, shards_to_write
from rrfp_jax.runtime.engine.engine import Engine
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
