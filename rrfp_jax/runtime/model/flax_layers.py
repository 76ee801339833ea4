"""Layers that are flax modules, of NNX or Linen, as pure functions over their parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from threading import RLock
from typing import Any, ClassVar, TypeAlias

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
from rrfp_jax.runtime.model.layers import Call, LayerKind, LayerSpec, MicrobatchView, Params, abstractly
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.model.unchanged import unchanging
from rrfp_jax.runtime.model.user_errors import building, called, instead_of_layer, kind_of, signature_of


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
    own: _NNXLayer | _LinenLayer
    if isinstance(factory, linen.Module):
        if factory.scope is not None:
            raise UsageError(
                f"layer({name}): this Linen module is bound to variables, which a layer has none of; give "
                f"the module without them, rrfp.layer(module.unbind()[0])"
            )
        own = _LinenLayer(factory, call)
    elif isinstance(factory, type) and issubclass(factory, linen.Module):
        with building(factory, args, kwargs, f"layer({name}): "):
            own = _LinenLayer(factory(*args, **kwargs), call)
    elif issubclass(factory, nnx.Module) if isinstance(factory, type) else _takes_rngs(factory):
        if any(isinstance(value, nnx.Rngs) for value in (*args, *kwargs.values())) or "rngs" in kwargs:
            raise UsageError(f"layer({name}): do not pass rngs: each stage makes its own")
        own = _NNXLayer(factory, args, kwargs, call)
    else:
        return None
    return LayerSpec(
        name=name,
        init=own.init,
        apply=unchanging(own.run, own.is_constant),
        fill=own.fill,
        repeat=repeat,
        kind=own.kind,
        partition=own.partition,
        is_constant=own.is_constant,
    )


def _takes_rngs(factory: Any, unnamed: bool = False) -> bool:
    """Whether a class or function takes `rngs`, by name or, if that counts, among whatever keywords come."""
    signature = signature_of(factory) if callable(factory) else None
    parameters = signature.parameters.values() if signature else ()
    return any(p.name == "rngs" or (unnamed and p.kind is p.VAR_KEYWORD) for p in parameters)


def _without_mesh() -> Any:
    """Inside, axes in the metadata of parameters are names of any mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@dataclass(frozen=True)
class _ModuleParts:
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


@dataclass(frozen=True, eq=False)
class _NNXLayer:
    """What is computed of an NNX class, or of a function that returns a module."""

    factory: Any
    args: Any
    kwargs: Any
    call: Call | None
    kind: ClassVar[LayerKind] = "nnx"

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return _plain(self._split(key)[0])

    def partition(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return nnx.to_pure_dict(nnx.get_partition_spec(self._parts.kept))  # type: ignore[no-any-return]

    def is_constant(self, path: str) -> bool:
        return path in self._parts.constants

    def fill(self, params: Params) -> Any:
        return self._filled(params, jax.random.key(0), training=False)

    def run(self, params: Params, carry: Any, mb: MicrobatchView) -> tuple[Any, Params]:
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
    def _parts(self) -> _ModuleParts:
        with _without_mesh():
            return abstractly(self._split)

    def _split(self, key: jax.Array) -> tuple[nnx.State, _ModuleParts]:
        """A new module's arrays and its parts."""
        graph, streams, params, others = nnx.split(self._build(key), nnx.RngState, nnx.Param, ...)
        constants = frozenset(leaf_paths({"": nnx.to_pure_dict(others)}))
        kept = nnx.merge_state(params, others)
        return kept, _ModuleParts(graph, streams, jax.tree.map(jax.typeof, kept), constants)

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

    def started(leaf: Any, number: int) -> jax.Array:
        if not is_key(leaf):
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = jax.random.fold_in(key, number)
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    leaves, structure = jax.tree.flatten(streams)
    return jax.tree.unflatten(structure, map(started, leaves, range(len(leaves))))  # type: ignore[no-any-return]


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
    own = variables.get(_PARAMS, {})
    marked = {key: tree for key, tree in own.items() if str(key).startswith(_COLLECTION)}
    others = {key: tree for key, tree in variables.items() if key != _PARAMS}
    others |= {_PARAMS: marked} if marked else {}
    return {key: tree for key, tree in own.items() if key not in marked} | {
        f"{_COLLECTION}{key}": tree for key, tree in others.items()
    }


@dataclass(frozen=True, eq=False)
class _LinenLayer:
    """What is computed of a Linen module without variables."""

    module: linen.Module
    call: Call | None
    kind: ClassVar[LayerKind] = "linen"

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return _params_of(_unboxed(self._boxed(key, carry, mb)))

    def partition(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return _params_of(linen.get_partition_spec(jax.eval_shape(self._boxed, key, carry, mb)))

    def is_constant(self, path: str) -> bool:
        return path.startswith(_COLLECTION) and not path.startswith(f"{_COLLECTION}{_PARAMS}.")

    def fill(self, params: Params) -> Any:
        return self.module.bind(variables_of(params), rngs={_PARAMS: jax.random.key(0)})

    def run(self, params: Params, carry: Any, mb: MicrobatchView) -> tuple[Any, Params]:
        """What the layer gives, and its parameters afterwards."""
        out, written = self._apply(variables_of(params), carry, mb)
        return out, {**params, **_params_of(written)}

    def _boxed(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Variables:
        """Initial variables, with flax's metadata around them."""

        def made(rngs: Mapping[str, jax.Array]) -> Variables:
            return unfreeze(self.module.init(rngs, carry, mb, method=self._method))  # type: ignore[no-any-return]

        def anywhere(rngs: Mapping[str, jax.Array]) -> Variables:
            try:
                return made(rngs)
            except ValueError as error:  # perhaps metadata names axes that the stage's mesh lacks
                with _without_mesh(), suppress(Exception):
                    return made(rngs)
                raise error

        variables = _with_streams(anywhere, key, training=True)
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
            jax.eval_shape(lambda *given: out({}, *given), others, carry, mb)
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


def _with_streams(function: Callable[[Mapping[str, jax.Array]], Any], key: jax.Array, training: bool) -> Any:
    """Call with a random key for every stream that modules inside ask for.

    Flax fails without the key of a stream, or takes that of "params". If modules only ask whether there is a
    stream (`has_rng`), there is one in training.
    """
    rngs = dict.fromkeys((_PARAMS, _DROPOUT) if training else (_PARAMS,), key)
    while True:
        with _asked_for() as (made, looked_for):
            try:
                out, error = function(rngs), None
            except InvalidRngError as lacking:
                out, error = None, lacking
        missing = (made | looked_for if training else made) - rngs.keys()
        if error is not None and not missing:
            raise error
        if not missing:
            return out
        rngs |= {name: _key_of(name, key) for name in missing}


def _key_of(stream: str, key: jax.Array) -> jax.Array:
    return key if stream == _DROPOUT else jax.random.fold_in(key, zlib.crc32(stream.encode()))


_LOCK = RLock()


@contextmanager
def _asked_for() -> Iterator[tuple[set[str], set[str]]]:
    """Names of streams of which keys are made inside, and those that are looked for; flax tells nobody."""
    made, looked_for = set[str](), set[str]()
    make_rng, has_rng = Scope.make_rng, Scope.has_rng

    def making(scope: Scope, name: str = _PARAMS) -> Any:
        made.add(name)
        return make_rng(scope, name)

    def having(scope: Scope, name: str) -> bool:
        looked_for.add(name)
        return bool(has_rng(scope, name))

    with _LOCK:
        Scope.make_rng, Scope.has_rng = making, having  # type: ignore[method-assign]
        try:
            yield made, looked_for
        finally:
            Scope.make_rng, Scope.has_rng = make_rng, has_rng  # type: ignore[method-assign]
