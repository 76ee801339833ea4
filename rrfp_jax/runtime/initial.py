"""Initial parameters: from the layers themselves, from a user's function, or some of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.compiling import Compiled, Compiler
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.paths import leaf_path, leaf_paths
from rrfp_jax.runtime.pipeline import LayerShapes, Pipeline

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
) -> Params:
    """The parameters of some layers, {layer index as text: tree}, on the compiler's device.

    Values of a layer depend on (seed, layer index) only; those of tied parameters (`owners` has the owner of
    each alias) on their owner's, which is made here once more rather than sent. A layer that `init` gives
    whole is not initialised by itself.

    Raises:
        UsageError: `init` gives an array of another shape or dtype than the parameter.
    """

    programs: dict[Any, Compiled] = {}

    def made(layer: int) -> Params:
        leaves, structure = jax.tree.flatten(shapes[layer].carry_in)
        kind = id(pipe.layers[layer]), structure, tuple(leaves)  # repeats of a layer share a program
        if kind not in programs:
            init_layer = partial(pipe.init_layer, layer, shapes[layer], fields)
            programs[kind] = compiler(init_layer, NUMBER, NUMBER)
        numbers = jax.device_put((np.uint32(seed), np.uint32(layer)), compiler.device)
        return programs[kind](*numbers)  # type: ignore[no-any-return]

    def value(path: str, spec: jax.ShapeDtypeStruct) -> Any:
        owner = owners.get(path, path)
        given = _from_user(init, owner, spec)
        if given is None and owner != path:
            layer = owner.partition(".")[0]
            tree = {layer: made(int(layer))}
            return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))[owner]
        return given

    params = {}
    for i in layers:
        given = jax.tree_util.tree_map_with_path(
            lambda path, spec, i=i: value(leaf_path(i, path), spec), shapes[i].params
        )
        own = given if _complete(given) else made(i)
        # A copy of what the user gives, because updates donate parameters.
        params[str(i)] = jax.tree.map(
            lambda g, o: o if g is None else jax.device_put(np.array(g), compiler.device),
            given,
            own,
            is_leaf=lambda g: g is None,
        )
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


def _complete(given: Any) -> bool:
    return all(leaf is not None for leaf in jax.tree.leaves(given, is_leaf=lambda leaf: leaf is None))
