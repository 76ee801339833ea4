"""Layers that are flax modules, of NNX or Linen, as pure functions over their parameters."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen, nnx
from flax.core import meta, unfreeze

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.built import instead_of_layer, kind_of
from rrfp_jax.runtime.model.calls import building, calling, signature_of
from rrfp_jax.runtime.model.layers import Apply, LayerSpec, MicrobatchView, Params


def layer_of(name: str, factory: Any, args: Any, kwargs: Any, repeat: int) -> LayerSpec | None:
    """The layer of a flax module or its class; None if it is neither.

    Raises:
        UsageError: an NNX module that is already built, a Linen module that has its variables, or the state
            of a training.
    """
    if kind_of(factory) in ("NNX module", "nnx.Optimizer", "TrainState"):
        raise UsageError(f"layer({name}): {instead_of_layer(factory)}")
    if isinstance(factory, linen.Module) and factory.scope is not None:
        raise UsageError(
            f"layer({name}): this Linen module is bound to variables, which a layer has none of; give the "
            f"module without them, rrfp.layer(module.unbind()[0])"
        )
    if isinstance(factory, linen.Module):
        return _linen_layer(name, factory, repeat)
    if isinstance(factory, type) and issubclass(factory, linen.Module):
        with building(factory, args, kwargs, f"layer({name}): "):
            module = factory(*args, **kwargs)
        return _linen_layer(name, module, repeat)
    if isinstance(factory, type) and issubclass(factory, nnx.Module):
        return nnx_layer(name, factory, args, kwargs, repeat)
    return None


def nnx_layer(name: str, factory: Any, args: Any, kwargs: Any, repeat: int) -> LayerSpec:
    """A layer of an NNX class, or of a function with an `rngs` parameter that returns a module.

    Raises:
        UsageError: random numbers are among the arguments.
    """
    if any(isinstance(value, nnx.Rngs) for value in (*args, *kwargs.values())) or "rngs" in kwargs:
        raise UsageError(f"layer({name}): do not pass rngs: each stage makes its own")
    signature = signature_of(factory)
    parameters = signature.parameters.values() if signature else ()
    takes_rngs = any(p.name == "rngs" or p.kind is p.VAR_KEYWORD for p in parameters)

    def build(key: jax.Array) -> Any:
        made = kwargs | ({"rngs": nnx.Rngs(key)} if takes_rngs else {})
        # Where parameters go is the stage's to say, which may have one device and no mesh.
        with nnx.use_eager_sharding(False), building(factory, args, made):
            return factory(*args, **made)

    def split(module: Any) -> tuple[Any, Any]:
        graph, params, other = nnx.split(module, nnx.Param, ...)
        _refuse_state(_bare_arrays(module))
        _refuse_state([".".join(map(str, path)) for path, _ in nnx.to_flat_state(other)])
        return graph, params

    def init(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return nnx.to_pure_dict(split(build(key))[1])  # type: ignore[no-any-return]

    def abstract() -> tuple[Any, Any]:
        return split(nnx.eval_shape(build, jax.eval_shape(jax.random.key, 0)))

    def partition(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return nnx.to_pure_dict(nnx.get_partition_spec(abstract()[1]))  # type: ignore[no-any-return]

    def make_apply() -> Apply:
        graph, state = abstract()
        structure = jax.tree.structure(state)

        def apply(params: Params, carry: Any, mb: MicrobatchView) -> Any:
            leaves = jax.tree.leaves(params)
            module = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            with calling(module):
                out = module(carry, mb)
            _refuse_changes(leaves, nnx.state(module, nnx.Param))
            return out

        return apply

    def fill(params: Params) -> Any:
        graph, state = abstract()
        return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params)))

    return LayerSpec(name, init, make_apply, repeat, partition, "nnx", fill=fill)


def _linen_layer(name: str, module: linen.Module, repeat: int) -> LayerSpec:
    def boxed(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        with calling(module):
            variables = unfreeze(module.init({"params": key, "dropout": key}, carry, mb))
        params = variables.pop("params", {})
        _refuse_state(sorted(variables))
        return params

    def init(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return meta.unbox(boxed(key, carry, mb))  # type: ignore[no-any-return]

    def partition(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return linen.get_partition_spec(jax.eval_shape(boxed, key, carry, mb))  # type: ignore[no-any-return]

    def apply(params: Params, carry: Any, mb: MicrobatchView) -> Any:
        # What a module asks for by another name than these, flax draws from "params".
        return module.apply({"params": params}, carry, mb, rngs={"dropout": mb.key, "params": mb.key})

    def fill(params: Params) -> Any:
        return module.bind({"params": params})

    return LayerSpec(name, init, lambda: apply, repeat, partition, "linen", fill=fill)


def _bare_arrays(module: Any) -> list[str]:
    """Names of arrays that are plain attributes of a module or of one inside it."""
    found = []
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            names = [name for name, value in vars(node).items() if isinstance(value, jax.Array)]
            found += [".".join(map(str, (*path, name))) for name in names]
    return found


def _refuse_state(variables: list[str]) -> None:
    if variables:
        raise UsageError(
            f"holds state that is no parameter: {', '.join(variables)}. Step programs take "
            f"parameters only: for randomness use mb.key (nnx.Dropout(rate)(x, rngs=nnx.Rngs(mb.key), "
            f"deterministic=not mb.training)), for constant tables NumPy arrays that are no attributes (made "
            f"in __call__, or outside the class), for normalisation a layer without running statistics "
            f"(LayerNorm, RMSNorm, GroupNorm)"
        )


def _refuse_changes(before: list[Any], after: Any) -> None:
    """Parameters are the same objects after a call if it has not changed them."""
    for (path, leaf), given in zip(jax.tree_util.tree_leaves_with_path(after), before, strict=True):
        if leaf is not given:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise UsageError(
                f"changes its parameter {name} when it is called; only the optimizer changes parameters: "
                f"compute with a local value"
            )
