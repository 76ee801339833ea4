"""Layers that are Linen modules, as pure functions over their variables."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, TypeAlias

import jax
from flax import linen
from flax.core import Scope, meta, unfreeze
from flax.errors import FlaxError, InvalidRngError, ModifyScopeVariableError
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import live_part
from rrfp_jax.runtime.model.layers import Apply, Call, LayerSpec, MicrobatchView, Params
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.model.sharding import without_mesh
from rrfp_jax.runtime.model.tree_layers import called
from rrfp_jax.runtime.model.unchanged import unchanging

Variables: TypeAlias = dict[str, Any]
"""By collection."""

_COLLECTION = "@"
"""What the names of collections other than "params" begin with among a layer's parameters.

Those of "params" that begin with it themselves lie in "@params".
"""

_PARAMS, _DROPOUT = "params", "dropout"


def linen_layer(name: str, module: linen.Module, call: Call | None, repeat: int) -> LayerSpec:
    """A layer of a module without variables."""
    own = _LinenLayer(module, call)

    def make_apply() -> Apply:
        return unchanging(own.run, is_constant)

    return LayerSpec(
        name, own.init, make_apply, repeat, own.partition, "linen", fill=own.fill, constants=constants
    )


def variables_of(params: Params) -> Variables:
    """A layer's parameters as flax has them, by collection."""
    own = {key: tree for key, tree in params.items() if not str(key).startswith(_COLLECTION)}
    others = {key.removeprefix(_COLLECTION): tree for key, tree in params.items() if key not in own}
    return {**others, _PARAMS: own | others.get(_PARAMS, {})}


def params_of(variables: Mapping[str, Any]) -> Params:
    """The inverse of `variables_of`."""
    own = variables.get(_PARAMS, {})
    marked = {key: tree for key, tree in own.items() if str(key).startswith(_COLLECTION)}
    others = {key: tree for key, tree in variables.items() if key != _PARAMS}
    others |= {_PARAMS: marked} if marked else {}
    return {key: tree for key, tree in own.items() if key not in marked} | {
        f"{_COLLECTION}{key}": tree for key, tree in others.items()
    }


def is_constant(path: str) -> bool:
    """Whether a parameter of this path in its layer is of another collection than "params"."""
    return path.startswith(_COLLECTION) and not path.startswith(f"{_COLLECTION}{_PARAMS}.")


def constants(params: Params) -> Collection[str]:
    """Paths of all those parameters."""
    return [path for path in leaf_paths({"": params}) if is_constant(path)]


@dataclass(frozen=True, eq=False)
class _LinenLayer:
    """What is computed of a Linen module."""

    module: linen.Module
    call: Call | None

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return params_of(_unboxed(self._boxed(key, carry, mb)))

    def partition(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return params_of(linen.get_partition_spec(jax.eval_shape(self._boxed, key, carry, mb)))

    def fill(self, params: Params) -> Any:
        return self.module.bind(variables_of(params), rngs={_PARAMS: jax.random.key(0)})

    def run(self, params: Params, carry: Any, mb: MicrobatchView) -> tuple[Any, Params]:
        """What the layer gives, and its parameters afterwards."""
        out, written = self._apply(variables_of(params), carry, mb)
        return out, {**params, **params_of(written)}

    def _boxed(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Variables:
        """Initial variables, with flax's metadata around them."""

        def made(rngs: Mapping[str, jax.Array]) -> Variables:
            return unfreeze(self.module.init(rngs, carry, mb, method=self._method))  # type: ignore[no-any-return]

        def anywhere(rngs: Mapping[str, jax.Array]) -> Variables:
            try:
                return made(rngs)
            except ValueError as error:  # perhaps metadata names axes that the stage's mesh lacks
                with without_mesh(), suppress(Exception):
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
    with without_mesh():
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
