"""Layers: NNX modules, Linen modules (`flax_layers.py`) and pure functions, brought to one form.

A layer computes `layer(carry, mb) -> carry`, or `(carry, Loss)` to add a term to the objective. Here it
becomes a pair of pure functions over a nested dict of parameters: `init(key, ...)` and `apply(params, ...)`.
Nothing is allocated before the stage that owns the layer asks for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.random_keys import as_key, plain
from rrfp_jax.runtime._jax import cast_like
from rrfp_jax.runtime.model.calls import (
    CALLED_WITHOUT_CALL,
    CARRY_AND_MB,
    calling,
    init_takes_carry,
    is_flag,
    second_argument,
    signature_of,
)

MOST_LAYERS = 2**16
"""Of a model, each of which is traced if it is unlike the one before it."""

Params: TypeAlias = Any
"""A pytree of arrays, nested dicts as a rule, or of their specs."""


@partial(jax.tree_util.register_dataclass, data_fields=["total", "weight", "metrics"], meta_fields=[])
@dataclass(frozen=True)
class Loss:
    """A microbatch's share of the objective: sums, never means.

    The objective of a step is the sum of all totals over the sum of all weights, so gradients are those of
    the whole batch however it is cut. An auxiliary term returned by a layer usually has weight 0: it adds to
    the numerator only.

    Attributes:
        total: scalar, the sum of the loss over whatever is counted.
        weight: scalar, how much was counted (tokens, rows).
        metrics: named scalar sums, reported divided by the step's weight. `rrfp.Sum`, `rrfp.Max` and
            `rrfp.Mean` around one have it reduced otherwise.
    """

    total: Any
    weight: Any = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


@jax.tree_util.register_pytree_node_class
class MicrobatchView(Mapping[str, Any]):
    """What a layer sees of a microbatch: its fields by name, `key`, its own random key, and `training`.

    `training` is False when evaluating; a layer with dropout reads it.

    The key depends on (seed, step, microbatch, layer) only, so a forward and its backward, and any order of
    microbatches, see the same numbers.
    """

    def __init__(self, fields: Mapping[str, Any], ids: Any, layer: int, training: bool = True) -> None:
        self._fields = dict(fields)
        self._ids = ids  # uint32[3]: seed, step, microbatch
        self._layer = layer
        self.training = training

    def with_training(self, training: bool) -> MicrobatchView:
        """The same microbatch, to train on or to evaluate."""
        return MicrobatchView(self._fields, self._ids, self._layer, training)

    @property
    def key(self) -> jax.Array:
        """The layer's random key for this microbatch."""
        seed, step, microbatch = self._ids
        key = jax.random.key(seed)
        for number in (step, microbatch, self._layer):
            key = jax.random.fold_in(key, number)
        return key

    def __getitem__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            known = ", ".join(sorted(self._fields)) or "none"
            raise UsageError(f"reads mb[{name!r}], but microbatches have the fields: {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def get(self, name: str, default: Any = None) -> Any:
        """The field if there is one; what a Mapping inherits would ask for it by [] and raise."""
        return self._fields.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, bool]]:
        """The arrays; the layer's index and `training` are static data."""
        return (self._fields, self._ids), (self._layer, self.training)

    @classmethod
    def tree_unflatten(cls, static: tuple[int, bool], children: tuple[Any, Any]) -> MicrobatchView:
        """The inverse of `tree_flatten`."""
        return cls(*children, *static)


@jax.tree_util.register_pytree_node_class
class EvaluationBatch(MicrobatchView):
    """A microbatch for calling exported layers: its fields, `training` False, and a `key`, always the same.

        carry = layer(None, rrfp.EvaluationBatch({"image": images}))

    It is a pytree, so functions under `jax.jit` take it.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, (0, 0, 0), 0, training=False)

    def tree_flatten(self) -> tuple[tuple[Any], None]:  # type: ignore[override]
        """The fields."""
        return (self._fields,), None

    @classmethod
    def tree_unflatten(cls, static: None, children: tuple[Any]) -> EvaluationBatch:  # type: ignore[override]
        """The inverse of `tree_flatten`."""
        return cls(*children)


Init: TypeAlias = Callable[[jax.Array, Any, MicrobatchView], Params]
Apply: TypeAlias = Callable[[Params, Any, MicrobatchView], Any]
Call: TypeAlias = Callable[[Any, Any, MicrobatchView], Any]
"""(module, carry, microbatch) -> what a layer gives."""


LayerKind: TypeAlias = Literal["nnx", "linen", "function"]


@dataclass(frozen=True)
class LayerSpec:
    """A layer as described by the user: how to make it, and how often it stands in a row.

    `partition`, asked as `init` is, gives what the layer itself says of the sharding of its parameters: a
    tree like them of PartitionSpecs. None if it says nothing.

    `fill` makes what users call from parameters: their own module with them, or their function.

    `constants` gives the paths of those parameters that nothing trains, such as tables.
    """

    name: str
    init: Init
    make_apply: Callable[[], Apply]
    repeat: int = 1
    partition: Init | None = None
    kind: LayerKind = "function"
    fill: Callable[[Params], Any] = field(kw_only=True)
    constants: Callable[[Params], Collection[str]] = field(default=lambda params: (), kw_only=True)


_ABSENT: Any = inspect.Parameter.empty


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
        return tree_layer(name, make, Parting(split, combine), call, repeat)
    if split is not None or combine is not None:
        raise UsageError(f"layer({name}): split= and combine= are for make=, layer(make=..., split=...)")
    plain = callable(factory) and not isinstance(factory, type)
    # What flax has not been imported for is none of its modules; the import takes a third of a second.
    if "flax" in sys.modules or (plain and init is None and "rngs" in inspect.signature(factory).parameters):
        from rrfp_jax.runtime.model import flax_layers

        if made := flax_layers.layer_of(name, factory, args, kwargs, repeat, call):
            if init is not None:
                raise UsageError(
                    f"layer({name}, init={shown(init)}): init= is for pure functions; {name} makes its "
                    f"parameters itself and takes no keyword named init: leave init= away"
                )
            return made
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


def _ours_and_theirs(factory: Any, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our keywords, None for those absent; and those for an author's class, or function of `rngs`."""
    present = {name: value for name, value in given.items() if value is not _ABSENT}
    signature = signature_of(factory) if callable(factory) else None
    theirs = {}
    if signature is not None and (isinstance(factory, type) or "rngs" in signature.parameters):
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        ours = {"init": given["init"] is None, "call": given["call"] is None or callable(given["call"])}
        theirs = {
            name: value
            for name, value in present.items()
            if not ours.get(name) and (takes_any or name in signature.parameters)
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


def _function(
    name: str, function: Callable[..., Any], init: Callable[..., Any] | None, repeat: int
) -> LayerSpec:
    """A layer of a function, which takes parameters if there is an `init`."""
    takes = CARRY_AND_MB if init is None else ("params", *CARRY_AND_MB)

    def apply(params: Params, carry: Any, mb: MicrobatchView) -> Any:
        with calling(function, takes):
            return function(carry, mb) if init is None else function(params, carry, mb)

    def made(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        if init is None:
            return {}
        given = (key, carry, mb) if init_takes_carry(init) else (key,)
        return init(*given)

    def fill(params: Params) -> Any:
        return partial(apply, params)

    return LayerSpec(name, made, lambda: apply, repeat, fill=fill)


def zeros(spec: Any) -> Any:
    """Zeros of a tree of specs; inside a trace they cost nothing."""
    return jax.tree.map(lambda leaf: cast_like(jnp.zeros(leaf.shape, leaf.dtype), leaf), spec)


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
