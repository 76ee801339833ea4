"""The kinds of layers that `rrfp.layer` takes: functions, trees, and modules of flax (`flax_layers.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import getitem
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.random_keys import as_key, plain
from rrfp_jax.runtime.model.layers import MOST_LAYERS, Call, LayerSpec, MicrobatchView, Params, abstractly
from rrfp_jax.runtime.model.user_errors import CARRY_AND_MB, called, calling, init_takes_carry, signature_of

_ABSENT: Any = object()


def layer(
    factory: Any = None,
    /,
    *args: Any,
    repeat: int = 1,
    init: Callable[..., Any] | None = None,
    call: Call | None = None,
    make: Callable[[jax.Array], Any] | None = _ABSENT,
    split: Callable[[Any], tuple[Any, Any]] | None = _ABSENT,
    combine: Callable[[Any, Any], Any] | None = _ABSENT,
    **kwargs: Any,
) -> LayerSpec:
    """Describe one layer, or `repeat` equal ones with their own parameters, without building anything.

        rrfp.layer(Block, config, repeat=24)
        rrfp.layer(Attention, config, call=lambda module, x, mb: module(x, mask=mb["mask"]))
        rrfp.layer(function, init=lambda key: {"w": jax.random.normal(key, (8, 8))})
        rrfp.layer(make=lambda key: equinox.nn.Linear(8, 8, key=key), call=lambda m, x, mb: jax.vmap(m)(x))

    Parameters have the names that the author of a class gave them, however the class is called.

    Args:
        factory: an NNX module class (or a function with an `rngs` parameter that returns a module), a Linen
            module class or module, or a pure function: `f(carry, mb)`, or `f(params, carry, mb)` with `init`.
        *args: passed to the module class; so is every further keyword. NNX classes get `rngs` as well.
        repeat: how many of this layer in a row.
        init: for a pure function with parameters: `init(key) -> params`, or `init(key, carry, mb) -> params`
            where shapes depend on what the layer gets; a pytree of arrays.
        call: how a module, or what `make` returns, is called: `call(object, carry, mb)` returns what a layer
            does, the next carry or (carry, Loss). Without `call` it is `object(carry, mb)`.
        make: instead of `factory`, a function of a random key that returns a pytree, such as a model of
            Equinox or penzai, or any object that `split` takes apart. It runs while JAX traces, so the arrays
            exist only where the layer is. Equal keys must give equal objects.
        split: for `make`: `split(object) -> (params, static)`, such as
            `lambda model: equinox.partition(model, equinox.is_inexact_array)`. The arrays in the pytree
            `params` are trained; their paths in it are their names. JAX arrays among the leaves of `static`
            are saved and exported, but not trained. Without `split`, floating point and complex arrays are
            trained.
        combine: for `make`: the inverse of `split`, `combine(params, static) -> object`. Without `combine`
            both must be trees like the object, each with None where the other has a leaf.
        **kwargs: see `args`. A class that has keywords named `init`, `make`, `split` or `combine` itself gets
            those, and its own `call` unless that is a function.

    Raises:
        UsageError: something that is none of these, such as an NNX module that is already built; a repeat
            below 1 or beyond 65,536; an `init`, `call`, `make`, `split` or `combine` that is no function, or
            that stands beside what it is not for.
    """
    given = {"init": init, "call": call, "make": make, "split": split, "combine": combine}
    own, authors = _ours_and_theirs(factory, given)
    init, call, make, split, combine = own.values()
    kwargs |= authors
    name = getattr(make or factory, "__name__", type(make or factory).__name__)
    _check(name, repeat, own)
    if make is not None:
        if factory is not None or args or kwargs or init is not None:
            raise UsageError(
                f"layer(make={name}): make= stands instead of a class or function, its arguments and init=; "
                f"bind arguments with functools.partial"
            )
        return _TreeLayer(make, split, combine, call).spec(name, repeat)
    if split is not None or combine is not None:
        raise UsageError(f"layer({name}): split= and combine= are for make=, layer(make=..., split=...)")
    plain = callable(factory) and not isinstance(factory, type)
    # What flax has not been imported for is none of its modules; the import takes a third of a second.
    if "flax" in sys.modules or (plain and init is None and _takes(factory, "rngs")):
        from rrfp_jax.runtime.model import flax_layers

        if made := flax_layers.layer_of(name, factory, args, kwargs, repeat, call):
            return _without_init(made, init)
    if call is not None:
        raise UsageError(
            f"layer({name}, call=...): call= is for modules of flax and for make=; {name} is "
            f"{'a function, which takes what it is given' if plain else 'neither'}"
        )
    if plain and not args and not kwargs:
        return _function(name, factory, init, repeat)
    raise UsageError(
        f"layer({name}): expected an NNX or Linen module class, a function f(carry, mb), a function "
        f"f(params, carry, mb) with init=, or make=; got {shown(factory)}"
        + (" with arguments: bind them with functools.partial" if args or kwargs else "")
    )


def _without_init(made: LayerSpec, init: Any) -> LayerSpec:
    """The layer of a module, which takes no `init`."""
    if init is not None:
        raise UsageError(
            f"layer({made.name}, init={shown(init)}): init= is for pure functions; {made.name} makes its "
            f"parameters itself and takes no keyword named init: leave init= away"
        )
    return made


def _takes(factory: Any, name: str) -> bool:
    signature = signature_of(factory)
    return signature is not None and name in signature.parameters


def _ours_and_theirs(factory: Any, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our keywords, None for those absent; and those for an author's class, or function of `rngs`."""
    present = {name: value for name, value in given.items() if value is not _ABSENT}
    theirs = {}
    if callable(factory) and (isinstance(factory, type) or _takes(factory, "rngs")):
        parameters = signature.parameters if (signature := signature_of(factory)) else {}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        ours = {"init": given["init"] is None, "call": given["call"] is None or callable(given["call"])}
        theirs = {
            name: value
            for name, value in present.items()
            if not ours.get(name) and (takes_any or name in parameters)
        }
    return {name: None if name in theirs else present.get(name) for name in given}, theirs


_CALLED: Mapping[str, str] = {
    "init": "a function of a random key, init(key)",
    "call": "a function call(module, carry, mb)",
    "make": "a function of a random key, make(key)",
    "split": "a function split(object) -> (params, static)",
    "combine": "a function combine(params, static) -> object",
}


def _check(name: str, repeat: Any, given: Mapping[str, Any]) -> None:
    if not isinstance(repeat, int) or isinstance(repeat, bool) or not 1 <= repeat <= MOST_LAYERS:
        raise UsageError(
            f"layer({name}, repeat={shown(repeat)}): a layer must stand there at least once, and at most "
            f"{MOST_LAYERS:,} times"
        )
    for what, value in given.items():
        if value is not None and not callable(value):
            raise UsageError(f"layer({name}, {what}={shown(value)}): give {_CALLED[what]}")


def _function(name: str, function: Callable[..., Any], init: Any, repeat: int) -> LayerSpec:
    """A layer of a function, which takes parameters if there is an `init`."""
    takes = CARRY_AND_MB if init is None else ("params", *CARRY_AND_MB)

    def apply(params: Params, carry: Any, mb: MicrobatchView) -> Any:
        with calling(function, takes):
            return function(carry, mb) if init is None else function(params, carry, mb)

    def made(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        if init is None:
            return {}
        return init(key, carry, mb) if init_takes_carry(init) else init(key)

    return LayerSpec(
        name=name, init=made, apply=apply, fill=lambda params: partial(apply, params), repeat=repeat
    )


_Path: TypeAlias = tuple[int | str, ...]


@dataclass(frozen=True)
class _TreeParts:
    """What an object consists of, without the values of its arrays.

    Attributes:
        arrays: paths and specs of those in `params`, in order of leaves, then of those in `static`.
        constants: names of the latter.
        params: the structure of what is trained.
        static: the structure of the rest.
        others: leaves of the rest that are no arrays, by place.
    """

    arrays: Sequence[tuple[_Path, Any]]
    constants: frozenset[str]
    params: Any
    static: Any
    others: Mapping[int, Any]


@dataclass(frozen=True, eq=False)
class _TreeLayer:
    """A layer whose object `make` returns, given a random key."""

    make: Callable[[jax.Array], Any]
    given_split: Callable[[Any], tuple[Any, Any]] | None
    given_combine: Callable[[Any, Any], Any] | None
    call: Call | None

    def spec(self, name: str, repeat: int) -> LayerSpec:
        return LayerSpec(
            name=name,
            init=lambda key, carry, mb: self._arrays(key)[0],
            apply=lambda params, carry, mb: called(self._filled(params), carry, mb, self.call),
            fill=self._filled,
            repeat=repeat,
            is_constant=lambda path: path in self._parts.constants,
        )

    def _arrays(self, key: jax.Array) -> tuple[Params, _TreeParts]:
        params, static = self._split(self.make(key))
        rest, structure = jax.tree_util.tree_flatten_with_path(static)
        kept = [(_path(path), leaf) for path, leaf in rest if isinstance(leaf, jax.Array)]
        others = {i: leaf for i, (_, leaf) in enumerate(rest) if not isinstance(leaf, jax.Array)}
        trained = _by_path(params)
        leaves = _comparable([*trained, *kept])
        constants = frozenset(_dotted(path) for path, _ in leaves[len(trained) :])
        specs = [(path, jax.typeof(leaf)) for path, leaf in leaves]
        parts = _TreeParts(specs, constants, jax.tree.structure(params), structure, others)
        return _nested([(path, plain(leaf)) for path, leaf in leaves]), parts

    @cached_property
    def _parts(self) -> _TreeParts:
        return abstractly(self._arrays)

    def _split(self, made: Any) -> tuple[Any, Any]:
        """What is trained, and the rest."""
        if self.given_split is None:
            params = jax.tree.map(lambda leaf: leaf if _is_trained(leaf) else None, made)
            return params, jax.tree.map(lambda leaf: None if _is_trained(leaf) else leaf, made)
        parts = self.given_split(made)
        if not isinstance(parts, tuple) or len(parts) != 2:
            raise UsageError(f"split= gives {shown(parts)}; return (params, static)")
        for path, leaf in _by_path(parts[0]):
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                raise UsageError(
                    f"split= gives params with {_dotted(path)} = {shown(leaf)}, which is no array; leave it "
                    f"in static"
                )
        return parts

    def _filled(self, params: Params) -> Any:
        """The object with these arrays."""
        own = self._parts
        leaves = iter([as_key(spec, reduce(getitem, path, params)) for path, spec in own.arrays])
        trained = [next(leaves) for _ in range(own.params.num_leaves)]
        places = range(own.static.num_leaves)
        rest = [own.others[i] if i in own.others else next(leaves) for i in places]
        parts = jax.tree.unflatten(own.params, trained), jax.tree.unflatten(own.static, rest)
        if self.given_combine is not None:
            return self.given_combine(*parts)
        return jax.tree.map(lambda a, b: b if a is None else a, *parts, is_leaf=lambda leaf: leaf is None)


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _by_path(tree: Any) -> list[tuple[_Path, Any]]:
    return [(_path(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _path(entries: Sequence[Any]) -> _Path:
    """Whole numbers, as of lists, stay such."""
    keys = (getattr(entry, "key", getattr(entry, "idx", None)) for entry in entries)
    return tuple(
        key if type(key) is int else jax.tree_util.keystr((entry,), simple=True)
        for key, entry in zip(keys, entries, strict=True)
    )


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path))


def _comparable(leaves: Sequence[tuple[_Path, Any]]) -> list[tuple[_Path, Any]]:
    """Leaves whose paths have text for a whole number that meets text in one dict: JAX sorts its keys."""
    texts = {
        tuple(map(str, path[:i])) for path, _ in leaves for i, key in enumerate(path) if isinstance(key, str)
    }

    def alike(path: _Path) -> _Path:
        written = tuple(map(str, path))
        return tuple(written[i] if written[:i] in texts else key for i, key in enumerate(path))

    return [(alike(path), leaf) for path, leaf in leaves]


def _nested(leaves: Sequence[tuple[_Path, Any]]) -> Params:
    """Leaves as nested dicts; refuses two of one path, and one inside another."""
    if [path for path, _ in leaves] == [()]:
        return leaves[0][1]
    tree: dict[int | str, Any] = {}
    for path, leaf in leaves:
        node: Any = tree
        for key in path[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not path or not isinstance(node, dict) or path[-1] in node:
            raise UsageError(
                f"two arrays have the name {_dotted(path)!r}: have split= return dicts with other keys"
            )
        node[path[-1]] = leaf
    return tree
