"""Layers that are objects of other libraries, taken apart into arrays by name and the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.random_keys import as_key, plain
from rrfp_jax.runtime.model.calls import CALLED_WITHOUT_CALL, calling, is_flag, second_argument
from rrfp_jax.runtime.model.layers import Apply, Call, LayerSpec, MicrobatchView, Params

Path: TypeAlias = tuple[int | str, ...]

CALL_TAKES = ("module", "carry", "mb")


@dataclass(frozen=True)
class Parting:
    """How an object is taken apart and put together again; None for the usual way.

    Attributes:
        given_split: object -> params, static.
        given_combine: params, static -> object.
    """

    given_split: Callable[[Any], tuple[Any, Any]] | None
    given_combine: Callable[[Any, Any], Any] | None

    def split(self, made: Any) -> tuple[Any, Any]:
        """What is trained, and the rest.

        Raises:
            UsageError: not two things, or something is to be trained that is no array.
        """
        if self.given_split is None:
            return _partition(made)
        parts = self.given_split(made)
        if not isinstance(parts, tuple) or len(parts) != 2:
            raise UsageError(f"split= gives {shown(parts)}; return (params, static)")
        for path, leaf in _named(parts[0]):
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                where = ".".join(map(str, path))
                raise UsageError(
                    f"split= gives params with {where} = {shown(leaf)}, which is no array; leave it in static"
                )
        return parts

    def combine(self, params: Any, static: Any) -> Any:
        """The object of its two parts."""
        if self.given_combine is not None:
            return self.given_combine(params, static)
        return jax.tree.map(
            lambda own, other: other if own is None else own, params, static, is_leaf=_is_none
        )


@dataclass(frozen=True)
class _Parts:
    """What an object consists of, without the values of its arrays.

    Attributes:
        arrays: paths and specs of those in `params`, in order of leaves, then of those in `static`.
        constants: names of the latter.
        params: the structure of what is trained.
        static: the structure of the rest.
        others: leaves of the rest that are no arrays, by place.
    """

    arrays: Sequence[tuple[Path, Any]]
    constants: frozenset[str]
    params: Any
    static: Any
    others: Mapping[int, Any]


def tree_layer(
    name: str, make: Callable[[jax.Array], Any], parting: Parting, call: Call | None, repeat: int
) -> LayerSpec:
    """A layer whose object `make` returns, given a random key."""

    def arrays(key: jax.Array) -> tuple[Params, _Parts]:
        params, static = parting.split(make(key))
        rest, structure = jax.tree_util.tree_flatten_with_path(static)
        kept = [(_path(path), leaf) for path, leaf in rest if isinstance(leaf, jax.Array)]
        others = {i: leaf for i, (_, leaf) in enumerate(rest) if not isinstance(leaf, jax.Array)}
        trained = _named(params)
        leaves = _comparable([*trained, *kept])
        constants = frozenset(".".join(map(str, path)) for path, _ in leaves[len(trained) :])
        specs = [(path, jax.typeof(leaf)) for path, leaf in leaves]
        parts = _Parts(specs, constants, jax.tree.structure(params), structure, others)
        return _nested([(path, plain(leaf)) for path, leaf in leaves]), parts

    @cache
    def parts() -> _Parts:
        found: list[_Parts] = []
        jax.eval_shape(lambda key: found.append(arrays(key)[1]), jax.eval_shape(jax.random.key, 0))
        return found[0]

    def filled(params: Params) -> Any:
        own = parts()
        leaves = iter([as_key(spec, _at(params, path)) for path, spec in own.arrays])
        trained = [next(leaves) for _ in range(own.params.num_leaves)]
        places = range(own.static.num_leaves)
        rest = [own.others[i] if i in own.others else next(leaves) for i in places]
        return parting.combine(jax.tree.unflatten(own.params, trained), jax.tree.unflatten(own.static, rest))

    def init(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return arrays(key)[0]

    def apply(params: Params, carry: Any, mb: MicrobatchView) -> Any:
        return called(filled(params), carry, mb, call)

    def make_apply() -> Apply:
        return apply

    return LayerSpec(name, init, make_apply, repeat, fill=filled, constants=lambda params: parts().constants)


def called(module: Any, carry: Any, mb: MicrobatchView, call: Call | None) -> Any:
    """What an object gives, called as its layer says.

    Raises:
        UsageError: the object or `call` takes other arguments.
    """
    if call is not None:
        with calling(call, CALL_TAKES):
            return call(module, carry, mb)
    second = second_argument(module)
    named_mb = second is not None and second.name == "mb"
    if second is not None and not named_mb and is_flag(second):
        raise UsageError(f"takes {second} as its second argument; {CALLED_WITHOUT_CALL}")
    try:
        with calling(module):
            return module(carry, mb)
    except (TypeError, AttributeError) as error:
        if named_mb or type(error) not in (TypeError, AttributeError):
            raise
        told = type(error)(f"{str(error).partition(chr(10))[0]}; {CALLED_WITHOUT_CALL}")
        raise told.with_traceback(error.__traceback__) from error


def _partition(tree: Any) -> tuple[Any, Any]:
    """A tree of what has a gradient, and one of the rest, each with None for the other."""

    def trained(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))

    params = jax.tree.map(lambda leaf: leaf if trained(leaf) else None, tree)
    static = jax.tree.map(lambda leaf: None if trained(leaf) else leaf, tree)
    return params, static


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _named(tree: Any) -> list[tuple[Path, Any]]:
    return [(_path(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _path(entries: Sequence[Any]) -> Path:
    """Whole numbers, as of lists, stay such."""
    keys = (getattr(entry, "key", getattr(entry, "idx", None)) for entry in entries)
    return tuple(
        key if type(key) is int else jax.tree_util.keystr((entry,), simple=True)
        for key, entry in zip(keys, entries, strict=True)
    )


def _comparable(leaves: Sequence[tuple[Path, Any]]) -> list[tuple[Path, Any]]:
    """Leaves whose paths have text for a whole number that meets text in one dict: JAX sorts its keys."""
    texts = {
        tuple(map(str, path[:i])) for path, _ in leaves for i, key in enumerate(path) if isinstance(key, str)
    }

    def alike(path: Path) -> Path:
        written = tuple(map(str, path))
        return tuple(written[i] if written[:i] in texts else key for i, key in enumerate(path))

    return [(alike(path), leaf) for path, leaf in leaves]


def _nested(leaves: Sequence[tuple[Path, Any]]) -> Params:
    """Leaves as nested dicts.

    Raises:
        UsageError: two have one path, or one lies inside another.
    """
    if [path for path, _ in leaves] == [()]:
        return leaves[0][1]
    tree: dict[int | str, Any] = {}
    for path, leaf in leaves:
        node: Any = tree
        for key in path[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not path or not isinstance(node, dict) or path[-1] in node:
            name = ".".join(map(str, path))
            raise UsageError(f"two arrays have the name {name!r}: have split= return dicts with other keys")
        node[path[-1]] = leaf
    return tree


def _at(tree: Params, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree
