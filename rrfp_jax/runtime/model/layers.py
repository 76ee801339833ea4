"""Layers as users describe them with `rrfp.layer`, as pure functions over nested dicts of parameters.

A layer computes `layer(carry, mb) -> carry`, or `(carry, Loss)` to add a term to the objective. Kinds of
layers are functions, objects that a function makes (trees), and modules of flax (`flax_layers.py`). Nothing
is allocated before the stage that owns the layer asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import getitem
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.random_keys import as_key, plain
from rrfp_jax.runtime._jax import cast_like
from rrfp_jax.runtime.model.user_errors import CARRY_AND_MB, called, calling, init_takes_carry, takes

MOST_LAYERS = 2**16
"""Most layers of a model; a layer is traced if it is unlike the one before it."""

Params: TypeAlias = Any
"""A pytree of arrays, nested dicts as a rule, or of their specs."""

Parts = TypeVar("Parts")

_ABSENT: Any = object()


class NoSuchField(UsageError, KeyError):
    """A layer reads a field that microbatches do not have, and may be prepared for that."""

    __str__ = UsageError.__str__


@jax.tree_util.register_pytree_node_class
class MicrobatchView(Mapping[str, Any]):
    """What a layer sees of a microbatch: its fields by name, `key`, its own random key, and `training`.

    `training` is False when evaluating; a layer with dropout reads it.

    The key depends on (seed, step, microbatch, layer) only, so a forward and its backward, and any order of
    microbatches, see the same numbers.
    """

    def __init__(self, fields: Mapping[str, Any], ids: Any, layer: Any, training: bool = True) -> None:
        self._fields = dict(fields)
        self._ids = ids  # uint32[3]: seed, step, microbatch
        self._layer = layer  # its index; an input of programs, so that equal layers have one
        self.training = training

    def with_training(self, training: bool) -> MicrobatchView:
        """The same microbatch, to train on or to evaluate."""
        return MicrobatchView(self._fields, self._ids, self._layer, training)

    @property
    def key(self) -> jax.Array:
        """The layer's random key for this microbatch."""
        seed, step, microbatch = self._ids
        return reduce(jax.random.fold_in, (step, microbatch, self._layer), jax.random.key(seed))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            known = ", ".join(sorted(self._fields)) or "none"
            raise NoSuchField(f"reads mb[{name!r}], but microbatches have the fields: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """The arrays and the layer's index; `training` is static data."""
        return (self._fields, self._ids, self._layer), (self.training,)

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, ...]) -> MicrobatchView:
        return cls(*children, *static)


@jax.tree_util.register_pytree_node_class
class EvaluationBatch(MicrobatchView):
    """A microbatch for calling exported layers: its fields, `training` False, and a `key`, always the same.

        carry = layer(None, rrfp.EvaluationBatch({"image": images}))

    It is a pytree, so functions under `jax.jit` take it.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, (0, 0, 0), 0, training=False)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self._fields,), ()


Call: TypeAlias = Callable[[Any, Any, MicrobatchView], Any]
"""(module, carry, microbatch) -> what a layer gives."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerSpec:
    """A layer as described by the user, which stands `repeat` times in a row."""

    name: str
    repeat: int
    kind: ClassVar[Literal["nnx", "linen", "function"]] = "function"

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        raise NotImplementedError

    def apply(self, params: Params, carry: Any, mb: MicrobatchView) -> Any:
        raise NotImplementedError

    def fill(self, params: Params) -> Any:
        """What users call: their own object with these parameters, or their function."""
        return partial(self.apply, params)

    def partition(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        """What the layer itself says of its parameters' sharding: a tree like them of PartitionSpecs."""
        return {}

    def is_constant(self, path: str) -> bool:
        """Whether nothing trains the parameter of a path, such as a table."""
        return False


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
            module class or module, a functools.partial of a class, or a pure function: `f(carry, mb)`, or
            `f(params, carry, mb)` with `init`.
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
            are saved and exported, but not trained. Without `split`, floating point and complex JAX arrays
            are trained; NumPy arrays are constants.
        combine: for `make`: the inverse of `split`, `combine(params, static) -> object`. Without `combine`
            both must be trees like the object, each with None where the other has a leaf.
        **kwargs: see `args`. A class that has keywords named `init`, `make`, `split` or `combine` itself gets
            those, and its own `call` unless that is a function.

    Raises:
        UsageError: something that is none of these, such as an NNX module that is already built; a repeat
            below 1 or beyond 65,536; an `init`, `call`, `make`, `split` or `combine` that is no function, or
            that stands beside what it is not for.
    """
    if isinstance(factory, partial) and isinstance(factory.func, type):  # its arguments come before these
        factory, args, kwargs = factory.func, (*factory.args, *args), {**factory.keywords, **kwargs}
    given: dict[str, Any] = {"init": init, "call": call, "make": make, "split": split, "combine": combine}
    authors = _authors_own(factory, given)
    ours = {name: None if name in authors or value is _ABSENT else value for name, value in given.items()}
    init, call, make, split, combine = ours.values()
    kwargs |= authors
    name = getattr(make or factory, "__name__", type(make or factory).__name__)
    _check(name, repeat, ours, alone=factory is None and not args and not kwargs)
    if make is not None:
        return TreeLayer(name=name, repeat=repeat, make=make, split=split, combine=combine, call=call)
    plain = callable(factory) and not isinstance(factory, type)
    # What flax has not been imported for is none of its modules; the import takes a third of a second.
    if "flax" in sys.modules or (plain and init is None and takes(factory, "rngs")):
        from rrfp_jax.runtime.model import flax_layers

        if made := flax_layers.layer_of(name, factory, args, kwargs, repeat, call):
            if init is None:
                return made
            raise UsageError(
                f"layer({name}, init={shown(init)}): init= is for pure functions; {name} makes its "
                f"parameters itself and takes no keyword named init: leave init= away"
            )
    if call is not None:
        raise UsageError(
            f"layer({name}, call=...): call= is for modules of flax and for make=; {name} is "
            f"{'a function, which takes what it is given' if plain else 'neither'}"
        )
    if plain and not args and not kwargs:
        return FunctionLayer(name=name, repeat=repeat, function=factory, make_params=init)
    raise UsageError(
        f"layer({name}): expected an NNX or Linen module class, a function f(carry, mb), a function "
        f"f(params, carry, mb) with init=, or make=; got {shown(factory)}"
        + (" with arguments: bind them with functools.partial" if args or kwargs else "")
    )


def _authors_own(factory: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ours that an author's class, or function of `rngs`, takes and that are meant for it."""
    if not isinstance(factory, type) and not takes(factory, "rngs"):
        return {}
    return {
        name: value
        for name, value in given.items()
        if value is not _ABSENT
        and not (value is None and name in ("init", "call"))
        and not (callable(value) and name == "call")
        and takes(factory, name, or_any=True)
    }


_CALLED: Mapping[str, str] = {
    "init": "a function of a random key, init(key)",
    "call": "a function call(module, carry, mb)",
    "make": "a function of a random key, make(key)",
    "split": "a function split(object) -> (params, static)",
    "combine": "a function combine(params, static) -> object",
}


def _check(name: str, repeat: Any, given: Mapping[str, Any], alone: bool) -> None:
    if not isinstance(repeat, int) or isinstance(repeat, bool) or not 1 <= repeat <= MOST_LAYERS:
        raise UsageError(
            f"layer({name}, repeat={shown(repeat)}): a layer must stand there at least once, and at most "
            f"{MOST_LAYERS:,} times"
        )
    for what, value in given.items():
        if value is not None and not callable(value):
            raise UsageError(f"layer({name}, {what}={shown(value)}): give {_CALLED[what]}")
    if given["make"] is not None and not (alone and given["init"] is None):
        raise UsageError(
            f"layer(make={name}): make= stands instead of a class or function, its arguments and init=; "
            f"bind arguments with functools.partial"
        )
    if given["make"] is None and (given["split"] is not None or given["combine"] is not None):
        raise UsageError(f"layer({name}): split= and combine= are for make=, layer(make=..., split=...)")


@dataclass(frozen=True, eq=False, kw_only=True)
class FunctionLayer(LayerSpec):
    """A layer of a function, which takes parameters if `make_params` makes some."""

    function: Callable[..., Any]
    make_params: Callable[..., Any] | None

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        if self.make_params is None:
            return {}
        return self.make_params(key, *((carry, mb) if init_takes_carry(self.make_params) else ()))

    def apply(self, params: Params, carry: Any, mb: MicrobatchView) -> Any:
        if self.make_params is None:
            with calling(self.function, without_params=True):
                return self.function(carry, mb)
        with calling(self.function, ("params", *CARRY_AND_MB)):
            return self.function(params, carry, mb)


_Path: TypeAlias = tuple[int | str, ...]


class _TreeParts(NamedTuple):
    """What an object consists of, without the values of its arrays."""

    arrays: Sequence[tuple[_Path, Any]]  # paths and specs of those in `params`, then of those in `static`
    constants: frozenset[str]  # names of the latter
    params: Any  # the structure of what is trained
    static: Any  # the structure of the rest
    rest: Sequence[Any]  # its leaves, with `_ABSENT` in place of arrays


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeLayer(LayerSpec):
    """A layer whose object `make` returns, given a random key."""

    make: Callable[[jax.Array], Any]
    split: Callable[[Any], tuple[Any, Any]] | None
    combine: Callable[[Any, Any], Any] | None
    call: Call | None

    def init(self, key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return self._arrays(key)[0]

    def apply(self, params: Params, carry: Any, mb: MicrobatchView) -> Any:
        return called(self.fill(params), carry, mb, self.call)

    def is_constant(self, path: str) -> bool:
        return path in self._parts.constants

    def fill(self, params: Params) -> Any:
        own = self._parts
        leaves = iter([as_key(spec, reduce(getitem, path, params)) for path, spec in own.arrays])
        trained = jax.tree.unflatten(own.params, [next(leaves) for _ in range(own.params.num_leaves)])
        rest = [next(leaves) if leaf is _ABSENT else leaf for leaf in own.rest]
        static = jax.tree.unflatten(own.static, rest)
        if self.combine is not None:
            return self.combine(trained, static)
        return jax.tree.map(
            lambda a, b: b if a is None else a, trained, static, is_leaf=lambda leaf: leaf is None
        )

    @cached_property
    def _parts(self) -> _TreeParts:
        return abstractly(self._arrays)

    def _arrays(self, key: jax.Array) -> tuple[Params, _TreeParts]:
        """A new object's arrays, and the rest of it."""
        params, static = self._split(self.make(key))
        trained, rest = tree_leaves_with_path(params), tree_leaves_with_path(static)
        kept = [(path, leaf) for path, leaf in rest if isinstance(leaf, jax.Array)]
        paths, leaves = _keys([path for path, _ in (*trained, *kept)]), [a for _, a in (*trained, *kept)]
        parts = _TreeParts(
            arrays=list(zip(paths, map(jax.typeof, leaves), strict=True)),
            constants=frozenset(map(_dotted, paths[len(trained) :])),
            params=jax.tree.structure(params),
            static=jax.tree.structure(static),
            rest=[_ABSENT if isinstance(leaf, jax.Array) else leaf for _, leaf in rest],
        )
        return nested(paths, map(plain, leaves)), parts

    def _split(self, made: Any) -> tuple[Any, Any]:
        """What is trained, and the rest."""
        if self.split is None:
            trained = jax.tree.map(lambda leaf: leaf if _is_inexact(leaf) else None, made)
            return trained, jax.tree.map(lambda leaf: None if _is_inexact(leaf) else leaf, made)
        parts = self.split(made)
        if not isinstance(parts, tuple) or len(parts) != 2:
            raise UsageError(f"split= gives {shown(parts)}; return (params, static)")
        for path, leaf in tree_leaves_with_path(parts[0]):
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                raise UsageError(
                    f"split= gives params with {keystr(path, simple=True, separator='.')} = {shown(leaf)}, "
                    f"which is no array; leave it in static"
                )
        return parts


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path))


def _keys(paths: Sequence[Sequence[Any]]) -> list[_Path]:
    """JAX's paths as keys of nested dicts; a whole number that meets text in one is text: JAX sorts keys."""
    keys = [tuple(map(plain_key, path)) for path in paths]
    both = [(own, tuple(map(str, own))) for own in keys]
    of_text = {text[:i] for own, text in both for i, key in enumerate(own) if isinstance(key, str)}
    return [tuple(text[i] if text[:i] in of_text else key for i, key in enumerate(own)) for own, text in both]


def plain_key(entry: Any) -> int | str:
    """An entry of a path as plain data: whole numbers, as of lists, stay such."""
    key = getattr(entry, "key", getattr(entry, "idx", None))
    return key if type(key) is int else keystr((entry,), simple=True)


def nested(paths: Sequence[_Path], leaves: Iterator[Any]) -> Params:
    """Leaves as nested dicts; refuses two of one path, and one inside another."""
    if list(paths) == [()]:
        return next(leaves)
    tree: dict[int | str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node: Any = tree
        for key in path[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not path or not isinstance(node, dict) or path[-1] in node:
            raise UsageError(
                f"two arrays have the name {_dotted(path)!r}: have split= return dicts with other keys"
            )
        node[path[-1]] = leaf
    return tree


def zeros(spec: Any) -> Any:
    """Zeros of a tree of specs; inside a trace they cost nothing."""
    return jax.tree.map(lambda leaf: cast_like(jnp.zeros(leaf.shape, leaf.dtype), leaf), spec)


def abstractly(parts: Callable[[jax.Array], tuple[Any, Parts]]) -> Parts:
    """The second thing that a function of a random key gives, without allocating anything."""
    found: list[Parts] = []
    jax.eval_shape(lambda key: found.append(parts(key)[1]), jax.eval_shape(jax.random.key, 0))
    return found[0]
