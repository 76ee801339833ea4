"""Layers: NNX modules, Linen modules (`flax_layers.py`) and pure functions, brought to one form.

A layer computes `layer(carry, mb) -> carry`, or `(carry, Loss)` to add a term to the objective. Here it
becomes a pair of pure functions over a nested dict of parameters: `init(key, ...)` and `apply(params, ...)`.
Nothing is allocated before the stage that owns the layer asks for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.runtime._jax import cast_like
from rrfp_jax.runtime.model.calls import CARRY_AND_MB, calling, init_takes_carry, signature_of

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
        from rrfp_jax.runtime.model import tree_layers

        return tree_layers.tree_layer(name, make, tree_layers.Parting(split, combine), call, repeat)
    if split is not None or combine is not None:
        raise UsageError(f"layer({name}): split= and combine= are for make=, layer(make=..., split=...)")
    plain = callable(factory) and not isinstance(factory, type)
    # What flax has not been imported for is none of its modules; the import takes a third of a second.
    if "flax" in sys.modules or (plain and init is None and "rngs" in inspect.signature(factory).parameters):
        from rrfp_jax.runtime.model import flax_layers

        if made := flax_layers.layer_of(name, factory, args, kwargs, repeat, call):
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
