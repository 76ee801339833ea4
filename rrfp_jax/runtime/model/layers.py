"""Layers: NNX modules, Linen modules (`flax_layers.py`) and pure functions, brought to one form.

A layer computes `layer(carry, mb) -> carry`, or `(carry, Loss)` to add a term to the objective. Here it
becomes a pair of pure functions over a nested dict of parameters: `init(key, ...)` and `apply(params, ...)`.
Nothing is allocated before the stage that owns the layer asks for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.runtime.model.calls import CARRY_AND_MB, calling

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


LayerKind: TypeAlias = Literal["nnx", "linen", "function"]


@dataclass(frozen=True)
class LayerSpec:
    """A layer as described by the user: how to make it, and how often it stands in a row.

    `partition`, asked as `init` is, gives what the layer itself says of the sharding of its parameters: a
    tree like them of PartitionSpecs. None if it says nothing.

    `fill` makes what users call from parameters: their own module with them, or their function.
    """

    name: str
    init: Init
    make_apply: Callable[[], Apply]
    repeat: int = 1
    partition: Init | None = None
    kind: LayerKind = "function"
    fill: Callable[[Params], Any] = field(kw_only=True)


def layer(
    factory: Any,
    *args: Any,
    repeat: int = 1,
    init: Callable[[jax.Array], Any] | None = None,
    **kwargs: Any,
) -> LayerSpec:
    """Describe one layer, or `repeat` equal ones with their own parameters, without building anything.

    Args:
        factory: an NNX module class (or a function with an `rngs` parameter that returns a module), a Linen
            module class or module, or a pure function: `f(carry, mb)`, or `f(params, carry, mb)` with `init`.
        *args: passed to the module class; so is every further keyword. NNX classes get `rngs` as well.
        repeat: how many of this layer in a row.
        init: for a pure function with parameters: `init(key) -> params`, a pytree of arrays.
        **kwargs: see `args`.

    Raises:
        UsageError: something that is none of these, such as an NNX module that is already built; a repeat
            below 1 or beyond 65,536; or an `init` that is no function.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    if not isinstance(repeat, int) or isinstance(repeat, bool) or not 1 <= repeat <= MOST_LAYERS:
        raise UsageError(
            f"layer({name}, repeat={shown(repeat)}): a layer must stand there at least once, and at most "
            f"{MOST_LAYERS:,} times"
        )
    if init is not None and not callable(init):
        raise UsageError(f"layer({name}, init={init!r}): give a function of a random key, init(key)")
    if "flax" in sys.modules:  # else it cannot be one of flax's, whose import takes a third of a second
        from rrfp_jax.runtime.model import flax_layers

        if made := flax_layers.layer_of(name, factory, args, kwargs, repeat):
            return made
    plain = callable(factory) and not isinstance(factory, type)
    if init is not None and plain and not args and not kwargs:
        return _function(name, factory, init, repeat)
    if plain and "rngs" in inspect.signature(factory).parameters:
        from rrfp_jax.runtime.model import flax_layers

        return flax_layers.nnx_layer(name, factory, args, kwargs, repeat)
    if plain and not args and not kwargs:
        return _function(name, factory, None, repeat)
    raise UsageError(
        f"layer({name}): expected an NNX or Linen module class, a function f(carry, mb), or a function "
        f"f(params, carry, mb) with init=; got {shown(factory)}"
        + (" with arguments: bind them with functools.partial" if args or kwargs else "")
    )


def _function(
    name: str, function: Callable[..., Any], init: Callable[[jax.Array], Any] | None, repeat: int
) -> LayerSpec:
    """A layer of a function, which takes parameters if there is an `init`."""
    takes = CARRY_AND_MB if init is None else ("params", *CARRY_AND_MB)

    def apply(params: Params, carry: Any, mb: MicrobatchView) -> Any:
        with calling(function, takes):
            return function(carry, mb) if init is None else function(params, carry, mb)

    def made(key: jax.Array, carry: Any, mb: MicrobatchView) -> Params:
        return {} if init is None else init(key)

    def fill(params: Params) -> Any:
        return partial(apply, params)

    return LayerSpec(name, made, lambda: apply, repeat, fill=fill)


def zeros(spec: Any) -> Any:
    """Zeros of a tree of specs; inside a trace they cost nothing."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)
