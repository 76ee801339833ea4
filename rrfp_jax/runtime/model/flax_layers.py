"""Layers that are flax modules, of NNX or Linen, as pure functions over their parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import RLock
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import Scope, meta, unfreeze
from flax.errors import FlaxError, InvalidRngError, ModifyScopeVariableError
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import AbstractMesh

from rrfp_jax.errors import UsageError
from rrfp_jax.random_keys import as_key, is_key, plain
from rrfp_jax.runtime._jax import live_part
from rrfp_jax.runtime.autodiff.traced import inputs_of_outputs
from rrfp_jax.runtime.model.layers import Call, LayerSpec, MicrobatchView, Params, abstractly
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.model.user_errors import building, called, instead_of_layer, kind_of, takes


def layer_of(
    name: str, factory: Any, args: Any, kwargs: Any, repeat: int, call: Call | None
) -> LayerSpec | None:
    """The layer of a flax module, its class, or a function of `rngs`; None if it is none of them."""
    if kind_of(factory) in ("NNX module", "nnx.Optimizer", "TrainState"):
        raise UsageError(f"layer({name}): {instead_of_layer(factory)}")
    if isinstance(factory, linen.Module):
        if factory.scope is not None:
            raise UsageError(
                f"layer({name}): this Linen module is bound to variables, which a layer has none of; give "
                f"the module without them, rrfp.layer(module.unbind()[0])"
            )
        if given := [*map(repr, args), *kwargs]:
            raise UsageError(
                f"layer({name}): this Linen module is built already, and takes no {', '.join(given)}: give "
                f"its class, or leave that out"
            )
        return LinenLayer(name=name, repeat=repeat, call=call, module=factory)
    if isinstance(factory, type) and issubclass(factory, linen.Module):
        with building(factory, args, kwargs, f"layer({name}): "):
            return LinenLayer(name=name, repeat=repeat, call=call, module=factory(*args, **kwargs))
    if issubclass(factory, nnx.Module) if isinstance(factory, type) else takes(factory, "rngs"):
        values = (*args, *kwargs.values())
        if any(isinstance(value, nnx.Rngs) for value in values) or "rngs" in kwargs:
            raise UsageError(f"layer({name}): do not pass rngs: each stage makes its own")
        built = [value for value in values if isinstance(value, nnx.Pytree | nnx.Variable)]
        if jax.tree.leaves(nnx.state(built, nnx.Param)):
            raise UsageError(
                f"layer({name}): it is given a module that is already built, of which every layer would have "
                f"its own copy; build it in the class, and share parameters by Pipeline(..., tied=...)"
            )
        return NNXLayer(name=name, repeat=repeat, call=call, factory=factory, args=args, kwargs=kwargs)
    return None


def _without_mesh() -> Any:
    """Inside, axes in the metadata of parameters are names of any mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@dataclass(frozen=True, eq=False, kw_only=True)
class FlaxLayer(LayerSpec):
    """A layer of a module, which must leave its parameters as they are, or is refused when it is called."""

    call: Call | None
    checked: set[Any] = field(default_factory=set, init=False)  # what it has been called with

    def run(self, params: Params, carry: Any, mb: MicrobatchView) -> tuple[Any, Params]:
        """What the layer gives, and its parameters afterwards."""
        raise NotImplementedError

    def apply(self, params: Params, carry: Any, mb: MicrobatchView) -> Any:
        out, after = self.run(params, carry, mb)
        before, now = _by_name(params), _by_name(after)
        doubtful = [name for name, leaf in before.items() if now.get(name) is not leaf]
        leaves, structure = jax.tree.flatten((carry, mb))
        kind = structure, tuple(map(jax.typeof, leaves))
        if doubtful and kind not in self.checked:  # transforms of flax return all variables, changed or not
            if lost := [name for name in doubtful if name not in now]:
                raise UsageError(f"removes its parameter {lost[0]} when it is called")

            def outputs(*given: Any) -> list[Any]:
                after = _by_name(self.run(*given)[1])
                return [after[name] for name in doubtful]

            same = inputs_of_outputs(jax.make_jaxpr(outputs)(params, carry, mb))
            places = {name: i for i, name in enumerate(before)}
            for name, place in zip(doubtful, same, strict=True):
                if place != places[name]:
                    raise UsageError(self._changes(name))
            self.checked.add(kind)
        return out

    def _changes(self, name: str) -> str:
        if self.is_constant(name):
            return (
                f"changes its variable {name} when it is called, but layers keep no state from call to call. "
                f"In place of running statistics take those of a trained model (use_running_average=True), "
                f"or LayerNorm, RMSNorm or GroupNorm"
            )
        return (
            f"changes its parameter {name} when it is called; only the optimizer changes parameters: compute "
            f"with a local value"
        )


def _by_name(tree: Params) -> dict[str, Any]:
    return dict(zip(leaf_paths({"": tree}), jax.tree.leaves(tree), strict=True))


class _ModuleParts(NamedTuple):
    """What an NNX module consists of, without values."""

    graph: Any  # all that is no array
    streams: nnx.State  # random ones
    kept: nnx.State  # all other arrays, which are the layer's parameters
    constants: frozenset[str]  # names of those that are no `nnx.Param`


@dataclass(frozen=True, eq=False, kw_only=True)
class NNXLayer(FlaxLayer):
    """A layer of an NNX class, or of a function that returns a module."""

    factory: Any
    args: Any
    kwargs: Any
    kind = "nnx"

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return _plain(self._split(key)[0])

    def partition(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return nnx.to_pure_dict(nnx.get_partition_spec(self._parts.kept))  # type: ignore[no-any-return]

    def is_constant(self, path: str) -> bool:
        return path in self._parts.constants

    def fill(self, params: Params) -> Any:
        return self._filled(params, jax.random.key(0), training=False)

    def run(self, params: Params, carry: Any, mb: MicrobatchView) -> tuple[Any, Params]:
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
        """The module with these parameters; each of its random streams begins with a key of its own."""
        specs, structure = jax.tree.flatten(self._parts.kept)
        kept = jax.tree.unflatten(structure, map(as_key, specs, jax.tree.leaves(params)))

        def started(number: int, leaf: Any) -> jax.Array:
            if not is_key(leaf):
                return jnp.zeros(leaf.shape, leaf.dtype)
            own = jax.random.fold_in(key, number)
            return jax.random.split(own, leaf.shape) if leaf.shape else own

        streams, structure = jax.tree.flatten(self._parts.streams)
        begun = jax.tree.unflatten(structure, [started(*pair) for pair in enumerate(streams)])
        module = nnx.merge(self._parts.graph, begun, kept)
        if not training:
            module.eval()
        return module

    @cached_property
    def _parts(self) -> _ModuleParts:
        with _without_mesh():
            return abstractly(self._split)

    def _split(self, key: jax.Array) -> tuple[nnx.State, _ModuleParts]:
        """A new module's arrays and its parts."""
        kwargs = self.kwargs | ({"rngs": nnx.Rngs(key)} if takes(self.factory, "rngs", or_any=True) else {})
        # Where parameters go is the stage's to say, which may have one device and no mesh.
        with nnx.use_eager_sharding(False), building(self.factory, self.args, kwargs):
            module = self.factory(*self.args, **kwargs)
        _own_traced(module)
        graph, streams, params, others = nnx.split(module, nnx.RngState, nnx.Param, ...)
        constants = frozenset(leaf_paths({"": nnx.to_pure_dict(others)}))
        kept = nnx.merge_state(params, others)
        streams, specs = jax.tree.map(jax.typeof, (streams, kept))
        return kept, _ModuleParts(graph, streams, specs, constants)


def _plain(state: nnx.State) -> Params:
    """Arrays, and numbers as such, as nested dicts; typed random keys as numbers."""
    return jax.tree.map(lambda leaf: plain(jnp.asarray(leaf)), nnx.to_pure_dict(state))  # type: ignore[no-any-return]


def _own_traced(module: nnx.Module) -> None:
    """Have arrays that `__init__` computed count as such; flax takes one that is being traced for none."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                    setattr(node, name, nnx.data(value))


Variables: TypeAlias = dict[str, Any]
"""By collection."""

_COLLECTION = "@"
"""What the names of collections other than "params" begin with among a layer's parameters.

Those of "params" that begin with it themselves lie in "@params".
"""

_PARAMS, _DROPOUT = "params", "dropout"


def variables_of(params: Params) -> Variables:
    """A layer's parameters as flax has them, by collection."""
    own = {key: tree for key, tree in params.items() if not str(key).startswith(_COLLECTION)}
    others = {key.removeprefix(_COLLECTION): tree for key, tree in params.items() if key not in own}
    return {**others, _PARAMS: own | others.get(_PARAMS, {})}


def _params_of(variables: Mapping[str, Any]) -> Params:
    """The inverse of `variables_of`."""
    params = variables.get(_PARAMS, {})
    marked = {key: tree for key, tree in params.items() if str(key).startswith(_COLLECTION)}
    others = {**variables, _PARAMS: marked}
    return {key: tree for key, tree in params.items() if key not in marked} | {
        f"{_COLLECTION}{key}": tree for key, tree in others.items() if marked or key != _PARAMS
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class LinenLayer(FlaxLayer):
    """A layer of a Linen module without variables."""

    module: linen.Module
    kind = "linen"

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return _params_of(_unboxed(self._boxed(key, carry, mb)))

    def partition(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return _params_of(linen.get_partition_spec(jax.eval_shape(self._boxed, key, carry, mb)))

    def is_constant(self, path: str) -> bool:
        return path.startswith(_COLLECTION) and not path.startswith(f"{_COLLECTION}{_PARAMS}.")

    def fill(self, params: Params) -> Any:
        return self.module.bind(variables_of(params), rngs={_PARAMS: jax.random.key(0)})

    def run(self, params: Params, carry: Any, mb: MicrobatchView) -> tuple[Any, Params]:
        out, written = self._apply(variables_of(params), carry, mb)
        return out, {**params, **_params_of(written)}

    def _boxed(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Variables:
        """Initial variables, with flax's metadata around them."""

        def made(rngs: Mapping[str, jax.Array]) -> Any:
            init = partial(self.module.init, rngs, carry, mb, method=self._method)
            try:
                return init()
            except ValueError as error:  # perhaps metadata names axes that the stage's mesh lacks
                with _without_mesh(), suppress(Exception):
                    return init()
                raise error

        variables: Variables = unfreeze(_with_streams(made, key, training=True))
        if OVERWRITE_WITH_GRADIENT in variables:
            raise UsageError(
                f"keeps {OVERWRITE_WITH_GRADIENT}: float8 scales, which every step replaces by their "
                f"gradients; no optimizer here does that: use dot_general_cls=None, or bfloat16"
            )
        return {key: tree for key, tree in variables.items() if self._needs(key, variables, carry, mb)}

    def _needs(self, collection: str, variables: Variables, carry: Any, mb: MicrobatchView) -> bool:
        """Whether anything follows from a collection, unlike from what `sow` leaves in one."""
        if collection == _PARAMS:
            return True
        others = {key: tree for key, tree in _unboxed(variables).items() if key != collection}
        own = _unboxed(variables[collection])

        def out(own: Any, others: Variables, carry: Any, mb: MicrobatchView) -> Any:
            given = {**others, collection: own} if own else others
            modes = [mb.with_training(training) for training in (True, False)]
            return [self._apply(given, carry, mode)[0] for mode in modes]

        closed = jax.make_jaxpr(out)(own, others, carry, mb)
        _, read = live_part(closed, [True] * len(closed.jaxpr.outvars))
        if any(i < len(jax.tree.leaves(own)) for i in read):
            return True
        try:
            jax.eval_shape(partial(out, {}), others, carry, mb)
        except FlaxError:  # the module reads or writes it, though nothing follows
            return True
        return False

    def _apply(self, variables: Variables, carry: Any, mb: MicrobatchView) -> tuple[Any, Variables]:
        """What the module gives, and the collections that it has written to, if any."""

        def applied(rngs: Mapping[str, jax.Array], **mutable: Any) -> Any:
            return self.module.apply(variables, carry, mb, rngs=rngs, method=self._method, **mutable)

        try:
            return _with_streams(applied, mb.key, mb.training), {}
        except ModifyScopeVariableError:
            others = [collection for collection in variables if collection != _PARAMS]
            if not others:
                raise
            out, written = _with_streams(partial(applied, mutable=others), mb.key, mb.training)
            return out, unfreeze(written)

    def _method(self, bound: linen.Module, carry: Any, mb: MicrobatchView) -> Any:
        return called(bound, carry, mb, self.call)


def _unboxed(tree: Any) -> Any:
    """Variables without flax's metadata, which would say here how they lie on a mesh."""
    with _without_mesh():
        return meta.unbox(tree)


_LOCK = RLock()


def _with_streams(function: Callable[[Mapping[str, jax.Array]], Any], key: jax.Array, training: bool) -> Any:
    """Call with a random key for every stream that modules ask for, also by `has_rng` in training.

    Flax tells nobody which these are, so it is listened to: by one thread at a time.
    """
    rngs = dict.fromkeys((_PARAMS, _DROPOUT) if training else (_PARAMS,), key)
    asked = set[str]()

    def making(scope: Scope, name: str = _PARAMS) -> Any:
        asked.add(name)
        return make_rng(scope, name)

    def having(scope: Scope, name: str) -> bool:
        asked.update([name] if training else [])
        return bool(has_rng(scope, name))

    while True:
        with _LOCK:
            make_rng, has_rng = Scope.make_rng, Scope.has_rng
            Scope.make_rng, Scope.has_rng = making, having  # type: ignore[method-assign]
            try:
                out = function(rngs)
            except InvalidRngError:
                if asked <= rngs.keys():
                    raise
            finally:
                Scope.make_rng, Scope.has_rng = make_rng, has_rng  # type: ignore[method-assign]
        if asked <= rngs.keys():
            return out
        for name in asked - rngs.keys():
            rngs[name] = key if name == _DROPOUT else jax.random.fold_in(key, zlib.crc32(name.encode()))
