"""What a layer is to the rest: what it is given, what it gives, and how it is described.

A layer computes `layer(carry, mb) -> carry`, or `(carry, Loss)` to add a term to the objective. A `LayerSpec`
has it as pure functions over a nested dict of parameters, whatever the user wrote (`layer_kinds.py`). Nothing
is allocated before the stage that owns the layer asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import cast_like

MOST_LAYERS = 2**16
"""Of a model, each of which is traced if it is unlike the one before it."""

Params: TypeAlias = Any
"""A pytree of arrays, nested dicts as a rule, or of their specs."""

Parts = TypeVar("Parts")


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

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """The arrays; the layer's index and `training` are static data."""
        return (self._fields, self._ids), (self._layer, self.training)

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, ...]) -> MicrobatchView:
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

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """The fields."""
        return (self._fields,), ()


Init: TypeAlias = Callable[[jax.Array, Any, MicrobatchView], Params]
Apply: TypeAlias = Callable[[Params, Any, MicrobatchView], Any]
Call: TypeAlias = Callable[[Any, Any, MicrobatchView], Any]
"""(module, carry, microbatch) -> what a layer gives."""

LayerKind: TypeAlias = Literal["nnx", "linen", "function"]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer as described by the user: how to make it, and how often it stands in a row.

    Attributes:
        init: makes its parameters.
        apply: computes what it gives.
        fill: makes what users call from parameters: their own module with them, or their function.
        partition: asked as `init` is, gives what the layer itself says of the sharding of its parameters: a
            tree like them of PartitionSpecs. None if it says nothing.
        is_constant: whether nothing trains the parameter of a path, such as a table.
    """

    name: str
    init: Init
    apply: Apply
    fill: Callable[[Params], Any]
    repeat: int = 1
    kind: LayerKind = "function"
    partition: Init | None = None
    is_constant: Callable[[str], bool] = lambda path: False


def zeros(spec: Any) -> Any:
    """Zeros of a tree of specs; inside a trace they cost nothing."""
    return jax.tree.map(lambda leaf: cast_like(jnp.zeros(leaf.shape, leaf.dtype), leaf), spec)


def abstractly(parts: Callable[[jax.Array], tuple[Any, Parts]]) -> Parts:
    """The second thing that a function of a random key gives, without allocating anything."""
    found: list[Parts] = []
    jax.eval_shape(lambda key: found.append(parts(key)[1]), jax.eval_shape(jax.random.key, 0))
    return found[0]
