"""Layers that are flax modules, of NNX or Linen, as pure functions over their parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from rrfp_jax.errors import UsageError
from rrfp_jax.random_keys import as_key, is_key, plain
from rrfp_jax.runtime.model.built import instead_of_layer, kind_of
from rrfp_jax.runtime.model.calls import building, signature_of
from rrfp_jax.runtime.model.layers import Apply, Call, LayerSpec, MicrobatchView, Params
from rrfp_jax.runtime.model.linen_layers import linen_layer
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.model.sharding import without_mesh
from rrfp_jax.runtime.model.tree_layers import called
from rrfp_jax.runtime.model.unchanged import unchanging


def layer_of(
    name: str, factory: Any, args: Any, kwargs: Any, repeat: int, call: Call | None
) -> LayerSpec | None:
    """The layer of a flax module, its class, or a function of `rngs`; None if it is none of them.

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
        return linen_layer(name, factory, call, repeat)
    if isinstance(factory, type) and issubclass(factory, linen.Module):
        with building(factory, args, kwargs, f"layer({name}): "):
            module = factory(*args, **kwargs)
        return linen_layer(name, module, call, repeat)
    if isinstance(factory, type) and issubclass(factory, nnx.Module):
        return _nnx_layer(name, factory, args, kwargs, repeat, call)
    if callable(factory) and not isinstance(factory, type) and _takes_rngs(factory):
        return _nnx_layer(name, factory, args, kwargs, repeat, call)
    return None


def _takes_rngs(factory: Any, unnamed: bool = False) -> bool:
    """Whether a class or function takes `rngs`, by name or, if that counts, among whatever keywords come."""
    signature = signature_of(factory)
    parameters = signature.parameters.values() if signature else ()
    return any(p.name == "rngs" or (unnamed and p.kind is p.VAR_KEYWORD) for p in parameters)


@dataclass(frozen=True)
class _Parts:
    """What an NNX module consists of, without values.

    Attributes:
        graph: all that is no array.
        streams: the state of random streams.
        kept: all other arrays, which are the layer's parameters.
        constants: names of those that are no `nnx.Param`.
    """

    graph: Any
    streams: nnx.State
    kept: nnx.State
    constants: frozenset[str]


def _nnx_layer(name: str, factory: Any, args: Any, kwargs: Any, repeat: int, call: Call | None) -> LayerSpec:
    """A layer of an NNX class, or of a function with an `rngs` parameter that returns a module.

    Raises:
        UsageError: random numbers are among the arguments.
    """
    if any(isinstance(value, nnx.Rngs) for value in (*args, *kwargs.values())) or "rngs" in kwargs:
        raise UsageError(f"layer({name}): do not pass rngs: each stage makes its own")
    own = _NNXLayer(factory, args, kwargs, call)
    return LayerSpec(
        name, own.init, own.make_apply, repeat, own.partition, "nnx", fill=own.fill, constants=own.constants
    )


@dataclass(frozen=True, eq=False)
class _NNXLayer:
    """What is computed of an NNX class, or of a function that returns a module."""

    factory: Any
    args: Any
    kwargs: Any
    call: Call | None

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return _plain(self._split(key)[1])

    def partition(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return nnx.to_pure_dict(nnx.get_partition_spec(self._parts.kept))  # type: ignore[no-any-return]

    def constants(self, params: Params) -> Collection[str]:
        return self._parts.constants

    def fill(self, params: Params) -> Any:
        return self._filled(params, jax.random.key(0), training=False)

    def make_apply(self) -> Apply:
        return unchanging(self._run, self._parts.constants.__contains__)

    def _run(self, params: Params, carry: Any, mb: MicrobatchView) -> tuple[Any, Params]:
        """What the layer gives, and its parameters afterwards."""
        module = self._filled(params, mb.key, mb.training)
        out = called(module, carry, mb, self.call)
        made = leaf_paths({"": nnx.to_pure_dict(nnx.state(module, nnx.Param))})
        if new := sorted({*made} - {*leaf_paths({"": params})}):
            raise UsageError(
                f"makes its parameter {new[0]} when it is called, when the optimizer has been made: make "
                f"it in __init__"
            )
        return out, _plain(nnx.state(module, nnx.Not(nnx.RngState)))

    def _filled(self, params: Params, key: jax.Array, training: bool) -> Any:
        """The module with these parameters; its random streams begin with the key."""
        specs, structure = jax.tree.flatten(self._parts.kept)
        kept = jax.tree.unflatten(structure, map(as_key, specs, jax.tree.leaves(params)))
        module = nnx.merge(self._parts.graph, _started(self._parts.streams, key), kept)
        if not training:
            module.eval()
        return module

    @cached_property
    def _parts(self) -> _Parts:
        found: list[_Parts] = []
        with without_mesh():
            jax.eval_shape(lambda key: found.append(self._split(key)[0]), jax.eval_shape(jax.random.key, 0))
        return found[0]

    def _split(self, key: jax.Array) -> tuple[_Parts, nnx.State]:
        """A new module's parts and its arrays."""
        graph, streams, params, others = nnx.split(self._build(key), nnx.RngState, nnx.Param, ...)
        constants = frozenset(leaf_paths({"": nnx.to_pure_dict(others)}))
        kept = nnx.merge_state(params, others)
        return _Parts(graph, streams, jax.tree.map(jax.typeof, kept), constants), kept

    def _build(self, key: jax.Array) -> Any:
        takes_rngs = _takes_rngs(self.factory, unnamed=True)
        kwargs = self.kwargs | ({"rngs": nnx.Rngs(key)} if takes_rngs else {})
        # Where parameters go is the stage's to say, which may have one device and no mesh.
        with nnx.use_eager_sharding(False), building(self.factory, self.args, kwargs):
            module = self.factory(*self.args, **kwargs)
        _own_traced(module)
        return module


def _plain(state: nnx.State) -> Params:
    """Arrays as nested dicts; typed random keys as numbers."""
    return jax.tree.map(plain, nnx.to_pure_dict(state))  # type: ignore[no-any-return]


def _own_traced(module: nnx.Module) -> None:
    """Have arrays count as such that were computed in `__init__` and are plain attributes.

    Flax takes an array that is being traced for none.
    """
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                    setattr(node, name, nnx.data(value))


def _started(streams: nnx.State, key: jax.Array) -> nnx.State:
    """Random streams at their beginning, each with a key of its own."""
    leaves, structure = jax.tree.flatten(streams)
    filled = []
    for i, leaf in enumerate(leaves):
        if is_key(leaf):
            own = jax.random.fold_in(key, i)
            filled.append(jax.random.split(own, leaf.shape) if leaf.shape else own)
        else:
            filled.append(jnp.zeros(leaf.shape, leaf.dtype))
    return jax.tree.unflatten(structure, filled)  # type: ignore[no-any-return]
