"""Initial parameters: from the layers themselves, from a user's function, or some of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.paths import leaf_path, leaf_paths
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiling import Compiled, Compiler

InitFunction: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], Any]
"""(path such as "3.attention.query", spec) -> array, or None for the layer's own initial value."""

NUMBER = jax.ShapeDtypeStruct((), jnp.uint32)


def initial_params(
    pipe: Pipeline,
    layers: range,
    shapes: Sequence[LayerShapes],
    fields: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
    init: InitFunction | None,
    compiler: Compiler,
    owners: Mapping[str, str],
    sharding: Sharding,
) -> Params:
    """The parameters of some layers, {layer index as text: tree}, on the compiler's devices.

    Values of a layer depend on (seed, layer index) only; those of tied parameters (`owners` has the owner of
    each alias) on their owner's, which is made here once more rather than sent. A layer that `init` gives
    whole is not initialised by itself.

    Raises:
        UsageError: `init` gives an array of another shape or dtype than the parameter.
    """

    stage_mesh = compiler.stage_mesh
    programs: dict[Any, Compiled] = {}

    def where(layer: int) -> list[Any]:
        return [stage_mesh.sharding(spec) for spec in sharding.of_params({str(layer): shapes[layer].params})]

    def made(layer: int) -> Params:
        leaves, structure = jax.tree.flatten(shapes[layer].carry_in)
        out = jax.tree.unflatten(jax.tree.structure(shapes[layer].params), where(layer))
        # Repeats of a layer share a program.
        kind = id(pipe.layers[layer]), structure, tuple(leaves), tuple(jax.tree.leaves(out))
        if kind not in programs:
            init_layer = partial(pipe.init_layer, layer, shapes[layer], fields)
            programs[kind] = compiler(init_layer, NUMBER, NUMBER, out=out)
        numbers = stage_mesh.put((np.uint32(seed), np.uint32(layer)))
        return programs[kind](*numbers)  # type: ignore[no-any-return]

    def value(path: str, spec: jax.ShapeDtypeStruct, lies: Any) -> jax.Array | None:
        """What is not the layer's own initial value, if this is not."""
        owner = owners.get(path, path)
        given = _from_user(init, owner, spec)
        if given is not None:
            return stage_mesh.put(np.array(given), lies)  # type: ignore[no-any-return]  # a copy: updates donate it
        if owner == path:
            return None
        layer = owner.partition(".")[0]
        tree = {layer: made(int(layer))}
        return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))[owner]  # type: ignore[no-any-return]

    params = {}
    for i in layers:
        leaves, structure = jax.tree_util.tree_flatten_with_path(shapes[i].params)
        values = [
            value(leaf_path(i, path), spec, lies) for (path, spec), lies in zip(leaves, where(i), strict=True)
        ]
        if any(own is None for own in values):
            pairs = zip(values, jax.tree.leaves(made(i)), strict=True)
            values = [made_here if own is None else own for own, made_here in pairs]
        params[str(i)] = jax.tree.unflatten(structure, values)
    return params


def _from_user(init: InitFunction | None, path: str, spec: jax.ShapeDtypeStruct) -> Any:
    """What the user's function gives for a parameter, None for nothing."""
    value = init(path, spec) if init is not None else None
    got = (getattr(value, "shape", None), getattr(value, "dtype", type(value).__name__))
    if value is not None and got != (spec.shape, spec.dtype):
        raise UsageError(
            f"init({path!r}) gave {got[1]}{list(got[0] or ())}; the parameter is "
            f"{spec.dtype}{list(spec.shape)}"
        )
    return value
