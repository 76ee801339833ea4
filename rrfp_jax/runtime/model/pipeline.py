"""A model as a list of layers with a loss, and runs of its layers as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.autodiff.remat import NONE, rematerialised
from rrfp_jax.runtime.model.layers import Apply, LayerSpec, Loss, MicrobatchView, Params, zeros
from rrfp_jax.runtime.model.sharding import WHOLE

LossFunction: TypeAlias = Callable[[Any, MicrobatchView], Loss]
Specs: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]

IDS = jax.ShapeDtypeStruct((3,), jnp.uint32)
"""Spec of the numbers a random key is made of: seed, step, microbatch."""


@dataclass(frozen=True)
class LayerShapes:
    """Specs of one layer for one shape bucket: its parameters, and the carry into and out of it.

    `partition` is what the layer itself says of the sharding of its parameters, by their paths in it.
    """

    params: Params
    carry_in: Any
    carry_out: Any
    partition: Mapping[str, PartitionSpec] = field(default_factory=dict)


class Pipeline:
    """Layers in order, then a loss.

    Args:
        layers: from `layer(...)`; the first one gets None as carry.
        loss: `loss(carry, mb) -> Loss` with sums over the microbatch, never means.
        additive: whether the loss of several rows is the sum of their losses. This is checked at the start.
            Say False only for a loss that couples the rows of a microbatch on purpose (contrastive ones).
        frozen: patterns such as "0.*" or "-1.attention.*" (as in `fnmatch`) of parameters that keep their
            values; a layer index below 0 counts from the end. Optimizers do not see them, they count in no
            norm, and nothing below the first trained layer is differentiated. A tied parameter is frozen by
            any of its names.
        tied: parameters that are one and the same, {"0.embedding": "-1.embedding"}: an owner, and its alias
            or a list of them; a layer index below 0 counts from the end. The initial value is the owner's.
            Gradients are the sum over all of them. The optimizer sees the owner only.
        sharding: how stages of several devices (`Mesh(tp=...)`) share parameters: patterns as in `frozen`,
            each with a `jax.sharding.PartitionSpec` over the axis "tp"; the first that matches counts. A
            parameter that none matches lies as its layer's own metadata says (`nnx.with_partitioning`), or
            whole on every device. See `docs/sharding.md`.
        carry: the PartitionSpec of what stages send to each other. `PartitionSpec(None, "tp")` spreads
            sequences, so that each device sends its part. Arrays with fewer dimensions stay whole.

    Raises:
        UsageError: no layers, or something that is not a layer. Names in `frozen`, `tied` and `sharding` are
            looked up by the Trainer, which knows the parameters.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        loss: LossFunction,
        *,
        additive: bool = True,
        frozen: str | Sequence[str] = (),
        tied: Mapping[str, str | Sequence[str]] | None = None,
        sharding: Mapping[str, PartitionSpec] | None = None,
        carry: PartitionSpec = WHOLE,
    ) -> None:
        if not isinstance(layers, Sequence):
            raise UsageError(f"Pipeline: expected a list of layers, got one thing: {_name(layers)}")
        for item in layers:
            if not isinstance(item, LayerSpec):
                raise UsageError(f"Pipeline: {_name(item)} is not a layer; wrap it: rrfp.layer(...)")
        if not layers:
            raise UsageError("Pipeline: no layers; give at least one rrfp.layer(...)")
        self.layers: tuple[LayerSpec, ...] = tuple(spec for spec in layers for _ in range(spec.repeat))
        self.loss = loss
        self.additive = additive
        self.frozen = _texts("frozen", frozen)
        if tied is not None and not isinstance(tied, Mapping):
            raise UsageError(f"Pipeline: tied={tied!r}: give a dict of owners with their aliases")
        self.tied = [
            (owner, alias) for owner, aliases in (tied or {}).items() for alias in _texts("tied", aliases)
        ]
        for pattern, spec in {**(sharding or {}), "carry": carry}.items():
            if not isinstance(spec, PartitionSpec):
                raise UsageError(f"Pipeline: {pattern!r}: {spec!r} is no jax.sharding.PartitionSpec")
        self.sharding, self.carry = dict(sharding or {}), carry
        self._applies: dict[int, Apply] = {}

    def __len__(self) -> int:
        return len(self.layers)

    def apply_layer(
        self, index: int, params: Params, carry: Any, mb: MicrobatchView
    ) -> tuple[Any, Loss | None]:
        """Run one layer; its carry, and its auxiliary term if it has one."""
        spec = self.layers[index]
        if id(spec) not in self._applies:
            self._applies[id(spec)] = spec.make_apply()
        out = self._applies[id(spec)](params, carry, mb)
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Loss):
            _check_sums(out[1])
            return out
        return out, None

    def apply_loss(self, carry: Any, mb: MicrobatchView) -> Loss:
        """The user's loss, checked to be scalar sums.

        Raises:
            UsageError: not a Loss, or not scalar.
        """
        loss = self.loss(carry, mb)
        if not isinstance(loss, Loss):
            got = describe(loss) if hasattr(loss, "dtype") else type(loss).__name__
            raise UsageError(f"returned {got}; return rrfp.Loss(sum, weight=count)")
        _check_sums(loss)
        return loss

    def shapes(self, fields: Specs) -> list[LayerShapes]:
        """Specs of every layer and carry for microbatches of these fields; nothing is allocated.

        Raises:
            UsageError: a layer that cannot take what the one before gives, naming both; a wrong loss.
        """
        shapes: list[LayerShapes] = []
        known: dict[Any, LayerShapes] = {}  # repeats of a layer are alike if they get the same
        carry: Any = None
        for index, spec in enumerate(self.layers):
            leaves, structure = jax.tree.flatten(carry)
            kind = id(spec), structure, tuple(leaves)
            if kind not in known:
                known[kind] = self._shapes_of_layer(index, carry, fields)
            shapes.append(known[kind])
            carry = known[kind].carry_out
        mb = MicrobatchView(fields, IDS, len(self.layers))
        try:
            jax.eval_shape(self.apply_loss, carry, mb)
        except UsageError as error:
            raise UsageError(f"the loss: {error}") from None
        except Exception as error:
            raise UsageError(self._misfit(len(self.layers), carry, error)) from error
        return shapes

    def _shapes_of_layer(self, index: int, carry: Any, fields: Specs) -> LayerShapes:
        """Specs of a layer that gets `carry`."""
        spec, mb = self.layers[index], MicrobatchView(fields, IDS, index)
        key = jax.eval_shape(jax.random.key, 0)
        try:
            params = jax.eval_shape(spec.init, key, carry, mb)
            partition = _partition(spec, key, carry, mb)
            out, _ = jax.eval_shape(partial(self.apply_layer, index), params, carry, mb)
            _check_carry(out)
        except UsageError as error:
            raise UsageError(f"layer {index} ({spec.name}): {error}") from None
        except Exception as error:
            raise UsageError(self._misfit(index, carry, error)) from error
        return LayerShapes(params, carry, out, partition)

    def init_layer(
        self, index: int, shapes: LayerShapes, fields: Specs, seed: jax.Array, number: jax.Array
    ) -> Params:
        """Initial parameters of a layer, to be traced.

        Repeats of a layer that get equal carries may share one program, and differ in `number` only.

        Args:
            index: of the layer, or of one that it repeats.
            shapes: of that layer.
            fields: specs of a microbatch.
            seed: of the model, a uint32 scalar.
            number: the layer's index, a uint32 scalar.
        """
        key = jax.random.fold_in(jax.random.key(seed), number)
        mb = MicrobatchView(zeros(dict(fields)), zeros(IDS), index)
        return self.layers[index].init(key, zeros(shapes.carry_in), mb)

    def _misfit(self, index: int, carry: Any, error: Exception) -> str:
        names = [spec.name for spec in self.layers] + ["the loss"]
        taker = f"layer {index} ({names[index]})" if index < len(self.layers) else "the loss"
        giver = f"layer {index - 1} ({names[index - 1]}) gives" if index else "the first layer gets"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"{taker} cannot take what {giver}, {describe(carry)}: {type(error).__name__}: {reason}"


def _partition(spec: LayerSpec, key: Any, carry: Any, mb: MicrobatchView) -> dict[str, PartitionSpec]:
    """What a layer says of the sharding of its parameters, by path in it."""
    if spec.partition is None:
        return {}
    specs = spec.partition(key, carry, mb)
    found, _ = jax.tree_util.tree_flatten_with_path(specs, lambda leaf: isinstance(leaf, PartitionSpec))
    by_path = {keystr(path, simple=True, separator="."): leaf for path, leaf in found}
    return {path: leaf for path, leaf in by_path.items() if any(name is not None for name in leaf)}


def _texts(setting: str, given: str | Sequence[str]) -> tuple[str, ...]:
    texts = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"Pipeline: {setting}=... has {text!r}; give names of parameters, as text")
    return texts


def _check_carry(carry: Any) -> None:
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in jax.tree.leaves(carry)):
        raise UsageError(
            f"gives {describe(carry)}, but random keys cannot be sent: read mb.key where it is used"
        )


def _check_sums(loss: Loss) -> None:
    for name, value in {"total": loss.total, "weight": loss.weight, **loss.metrics}.items():
        if jnp.shape(value) != ():
            raise UsageError(f"Loss {name} has shape {jnp.shape(value)}; it must be a scalar sum: add .sum()")


def describe(tree: Any) -> str:
    """A tree of specs as short text, such as `{'x': float32[2, 16]}`."""
    if tree is None:
        return "None"
    return str(jax.tree.map(lambda leaf: _Bare(f"{leaf.dtype}{list(leaf.shape)}"), tree))


def _name(thing: Any) -> str:
    return str(getattr(thing, "name", getattr(thing, "__name__", repr(thing))))


class _Bare(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def add_losses(losses: Sequence[Loss]) -> Loss | None:
    """The sum of several terms, or None if there are none."""
    if not losses:
        return None
    names = sorted({name for loss in losses for name in loss.metrics})
    return Loss(
        sum(jnp.asarray(loss.total, jnp.float32) for loss in losses),
        sum(jnp.asarray(loss.weight, jnp.float32) for loss in losses),
        {n: sum(jnp.asarray(loss.metrics.get(n, 0.0), jnp.float32) for loss in losses) for n in names},
    )


def run_layers(
    pipe: Pipeline,
    layers: range,
    params: Sequence[Params],
    carry: Any,
    fields: Mapping[str, Any],
    ids: Any,
    *,
    training: bool = True,
    remat: str = NONE,
) -> tuple[Any, Loss | None]:
    """Layers in a row, and the loss if they reach the end of the model (the carry is then None).

    Raises:
        UsageError: `remat` is no name that `rematerialised` knows.
    """
    losses = []
    for index, own in zip(layers, params, strict=True):
        layer = rematerialised(partial(pipe.apply_layer, index), remat)
        carry, term = layer(own, carry, MicrobatchView(fields, ids, index, training))
        losses += [] if term is None else [term]
    if layers.stop == len(pipe):
        losses.append(pipe.apply_loss(carry, MicrobatchView(fields, ids, len(pipe), training)))
        carry = None
    return carry, add_losses(losses)
