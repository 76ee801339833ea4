"""A model as a list of layers with a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import says_its_arguments, shown
from rrfp_jax.runtime.autodiff.traced import check_pure, inline, output_dependence
from rrfp_jax.runtime.model.layers import MOST_LAYERS, LayerSpec, MicrobatchView, Params, zeros
from rrfp_jax.runtime.model.metrics import Loss, check_sums
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.model.user_errors import (
    NUMBERS,
    calling,
    describe,
    instead_of_layer,
    instead_of_layers,
    named,
)

Specs: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]

IDS = jax.ShapeDtypeStruct((3,), jnp.uint32)
"""Spec of the numbers a random key is made of: seed, step, microbatch."""

INDEX = jax.ShapeDtypeStruct((), jnp.uint32)
"""Spec of a layer's index, of which its random key is made, too."""


@dataclass(frozen=True)
class LayerShapes:
    """Specs of one layer for one shape bucket.

    `traced` takes flat lists: parameters, carry, fields, numbers, index -> carry, and total and weight if the
    layer has a term of its own, with these `metrics`. `initial` gives the parameters. `partition` is the
    layer's own word, by paths in it.
    """

    params: Params
    carry_in: Any
    carry_out: Any
    traced: ClosedJaxpr
    initial: ClosedJaxpr
    partition: Mapping[str, PartitionSpec] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


WHOLE = PartitionSpec()
"""The spec of what every device of a stage has whole."""

_ELSEWHERE = {
    **dict.fromkeys(["loss_fn", "loss_function"], "it is loss: Pipeline(layers, loss)"),
    **dict.fromkeys(["num_stages", "stages", "pp"], "stages are of the mesh: Trainer(..., mesh=Mesh(pp=4))"),
    "freeze": "it is frozen: Pipeline(layers, loss, frozen=['0.*'])",
    "model": "a model is a list of layers: Pipeline([rrfp.layer(Embed), rrfp.layer(Head)], loss)",
}


@says_its_arguments(_ELSEWHERE)
class Pipeline:
    """Layers in order, then a loss.

    Args:
        layers: from `layer(...)`; the first one gets None as carry. Listing a layer several times, as in
            `[attend, mlp] * 3`, creates independent layers with their own parameters.
        loss: `loss(carry, mb) -> Loss` with sums over the microbatch, never means.
        additive: whether the loss of several rows is the sum of their losses. This is checked at the start.
            Pass False only for a loss that couples the rows of a microbatch on purpose (contrastive ones).
        frozen: patterns such as `"0.*"` or `"-1.attention.*"` (as in `fnmatch`) of parameters that keep their
            values; a layer index below 0 counts from the end. Optimizers do not see them, norms exclude them,
            and nothing below the first trained layer is differentiated. A tied parameter is frozen by any of
            its names.
        tied: parameters that are one and the same, {"0.embedding": "-1.embedding"}: an owner, and its alias
            or a list of them; a layer index below 0 counts from the end. The initial value is the owner's.
            Gradients are the sum over all of them. The optimizer sees the owner only.
        sharding: how stages of several devices (`Mesh(tp=...)`) share parameters: patterns as in `frozen`,
            each with a `jax.sharding.PartitionSpec` over the axis "tp"; the first that matches counts.
            Unmatched parameters follow their layer's own metadata (`nnx.with_partitioning`), or are
            replicated. See `docs/sharding.md`.
        carry: the PartitionSpec of activations between stages. `PartitionSpec(None, "tp")` shards sequences,
            so that each device sends its part. Arrays with fewer dimensions stay replicated.

    Raises:
        UsageError: no layers, too many, or something that is not a layer. Names in `frozen`, `tied` and
            `sharding` are looked up by the Trainer, which knows the parameters.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        loss: Callable[[Any, MicrobatchView], Loss],
        *,
        additive: bool = True,
        frozen: str | Sequence[str] = (),
        tied: Mapping[str, str | Sequence[str]] | None = None,
        sharding: Mapping[str, PartitionSpec] | None = None,
        carry: PartitionSpec = WHOLE,
    ) -> None:
        if not isinstance(layers, Sequence):
            raise UsageError(f"Pipeline: layers: {instead_of_layers(layers)}")
        for number, item in enumerate(layers):
            if not isinstance(item, LayerSpec):
                raise UsageError(f"Pipeline: layers[{number}]: {instead_of_layer(item)}")
        if not layers:
            raise UsageError("Pipeline: no layers; give at least one rrfp.layer(...)")
        if not callable(loss):
            raise UsageError(f"Pipeline: loss={loss!r}: give a function loss(carry, mb) -> rrfp.Loss")
        if not isinstance(additive, bool):
            raise UsageError(f"Pipeline: additive={additive!r}: give True or False")
        if (count := sum(spec.repeat for spec in layers)) > MOST_LAYERS:
            raise UsageError(f"Pipeline: {count:,} layers: give at most {MOST_LAYERS:,}")
        self.layers: tuple[LayerSpec, ...] = tuple(spec for spec in layers for _ in range(spec.repeat))
        self.loss, self.additive, self.frozen = loss, additive, _texts("frozen", frozen)
        if tied is not None and not isinstance(tied, Mapping):
            raise UsageError(f"Pipeline: tied={tied!r}: give a dict of owners with their aliases")
        if sharding is not None and not isinstance(sharding, Mapping):
            raise UsageError(f"Pipeline: sharding={sharding!r}: give a dict of patterns with PartitionSpecs")
        owners = _texts("tied", list(tied or ()))
        self.tied = [(owner, alias) for owner in owners for alias in _texts("tied", (tied or {})[owner])]
        for pattern, spec in {**(sharding or {}), "carry": carry}.items():
            if not isinstance(spec, PartitionSpec):
                raise UsageError(f"Pipeline: {pattern!r}: {spec!r} is no jax.sharding.PartitionSpec")
        self.sharding, self.carry = dict(sharding or {}), carry

    def __len__(self) -> int:
        return len(self.layers)

    def constants(self, params: Params) -> frozenset[str]:
        """Paths of what no optimizer may change, although it is part of {layer index as text: tree}."""
        parts = ((path, *path.partition(".")[::2]) for path in leaf_paths(params))
        return frozenset(path for path, index, own in parts if self.layers[int(index)].is_constant(own))

    def who(self, index: int) -> str:
        """A layer as messages name it; the loss comes after the last one."""
        return f"layer {index} ({self.layers[index].name})" if index < len(self) else "the loss"

    def apply_layer(
        self, index: int, params: Params, carry: Any, mb: MicrobatchView
    ) -> tuple[Any, Loss | None]:
        """Run one layer; its carry, and its auxiliary term if it has one."""
        out = self.layers[index].apply(params, carry, mb)
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Loss):
            check_sums(out[1])
            return out
        return out, None

    def apply_loss(self, carry: Any, mb: MicrobatchView) -> Loss:
        """The user's loss, refused if it is no `Loss` of scalar sums."""
        with calling(self.loss):
            loss = self.loss(carry, mb)
        if not isinstance(loss, Loss):
            got = describe(loss) if hasattr(loss, "dtype") else type(loss).__name__
            raise UsageError(f"returned {got}; return rrfp.Loss(sum, weight=count)")
        check_sums(loss)
        return loss

    def shapes(
        self, fields: Specs, built: Sequence[LayerShapes] = (), alike: bool = False
    ) -> list[LayerShapes]:
        """Specs of every layer for microbatches of these fields; refuses one that cannot take its carry.

        When evaluating, with what has been `built` for training: if that was for the same fields, `alike`,
        all but the last must give the same, too.
        """
        shapes: list[LayerShapes] = []
        known: dict[Any, LayerShapes] = {}  # repeats of a layer are alike if they get the same
        carry: Any = None
        for index, spec in enumerate(self.layers):
            leaves, structure = jax.tree.flatten(carry)
            kind = id(spec), structure, tuple(leaves)
            with named(self.who(index), "cannot compare what it gets with what its repeats get"):
                is_known = kind in known
            if not is_known:
                known[kind] = self._layer_shapes(index, carry, fields, built[index] if built else None)
            shapes.append(known[kind])
            carry = known[kind].carry_out
            if alike and index + 1 < len(self) and _specs(carry) != _specs(built[index].carry_out):
                raise UsageError(
                    f"{self.who(index)}: gives {describe(carry)} when evaluating, where mb.training is False"
                    f", but {describe(built[index].carry_out)} in training; it must give the same in both"
                )
        self.traced_loss(carry, fields, training=not built)
        return shapes

    def traced_loss(self, carry: Any, fields: Specs, training: bool = True) -> ClosedJaxpr:
        """The loss as a function of flat lists: carry, fields and numbers -> total, weight."""

        def sums(carry: Any, fields: Specs, ids: Any) -> tuple[Any, Any]:
            loss = self.apply_loss(carry, MicrobatchView(fields, ids, len(self.layers), training))
            return loss.total, loss.weight

        with named(*self._called(len(self), carry, fields, training)):
            closed = jax.make_jaxpr(sums)(carry, dict(fields), IDS)
            check_pure(closed)
        return closed

    def _layer_shapes(self, index: int, carry: Any, fields: Specs, built: LayerShapes | None) -> LayerShapes:
        """Specs of a layer that gets `carry`; when evaluating, with what was built for training."""
        spec, who, given = self.layers[index], self.who(index), self._given(index, carry, fields)
        key, mb = jax.eval_shape(jax.random.key, 0), MicrobatchView(fields, IDS, index)
        training = built is None
        metrics: dict[str, Any] = {}

        def traced(params: Params, carry: Any, fields: Specs, ids: Any, number: Any) -> tuple[Any, Any]:
            out, term = self.apply_layer(index, params, carry, MicrobatchView(fields, ids, number, training))
            _check_carry(out)
            if term is None:
                return out, None
            metrics.update(jax.tree.map(jax.typeof, dict(term.metrics)))
            return out, (term.total, term.weight)

        if built is not None:
            initial, params, partition = built.initial, built.params, built.partition
        else:
            with named(who, f"cannot be built{given if spec.kind == 'linen' else ''}"):
                initial, params = jax.make_jaxpr(spec.init, return_shape=True)(key, carry, mb)
                # As an update of optax would type them, too.
                params = jax.tree.map(lambda p: p.update(weak_type=False) if p.weak_type else p, params)
                _check_initial(initial, params)
                partition = _partition(spec.partition(key, carry, mb))
        with named(*self._called(index, carry, fields, training)):
            arguments = params, carry, dict(fields), IDS, INDEX
            closed, (out, _) = jax.make_jaxpr(traced, return_shape=True)(*arguments)
            check_pure(closed)
            _check_constants(closed)
        return LayerShapes(params, carry, out, closed, initial, partition, metrics)

    def init_layer(
        self, index: int, shapes: LayerShapes, fields: Specs, seed: jax.Array, number: jax.Array
    ) -> Params:
        """Initial parameters of layer `number`, like layer `index` or a repeat of it; to be traced."""
        key = jax.random.fold_in(jax.random.key(seed), number)
        mb = MicrobatchView(zeros(dict(fields)), zeros(IDS), index)
        return self.layers[index].init(key, zeros(shapes.carry_in), mb)

    def _given(self, index: int, carry: Any, fields: Specs) -> str:
        """What a layer, or the loss, gets from the one before; at the ends, with the microbatch's fields."""
        own = f" and the fields {describe(dict(fields))}" if index in (0, len(self)) else ""
        what = f"what {self.who(index - 1)} gives, {describe(carry)}" if index else "None as carry"
        return f" with {what}{own}"

    def _called(self, index: int, carry: Any, fields: Specs, training: bool) -> tuple[str, str]:
        """Who is called, and what is said if that fails: a layer before that gave None is named first."""
        who = self.who(index)
        if carry is None and index > 0:
            before = f"{self.who(index - 1)} returned None (is a `return` missing?)"
            return f"{before}, and {who}", "failed because of it"
        to = "" if training else " to evaluate, with mb.training = False,"
        return who, f"failed when it was called{to}{self._given(index, carry, fields)}"


def _specs(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _check_carry(carry: Any) -> None:
    """Refuse what cannot be sent: leaves that are neither arrays nor numbers, and random keys."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        where = f"carry{keystr(path)}"
        if not isinstance(leaf, NUMBERS):
            raise UsageError(
                f"gives {where} = {shown(leaf)}, of type {type(leaf).__name__}; a carry is a tree of arrays "
                f"and numbers: register a class of yours with jax.tree_util.register_dataclass, and keep "
                f"what is no number in the layer"
            )
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UsageError(
                f"gives {where} of dtype {leaf.dtype}, but random keys cannot be sent: read mb.key where it "
                f"is used"
            )


def _check_initial(closed: ClosedJaxpr, params: Params) -> None:
    """Refuse initial values that follow from data: parameters are made before there is any.

    Data may choose between branches that make them, as within flax's `cond`: taken is what zeros choose.
    """
    data = (1 << len(closed.jaxpr.invars)) - 2  # all inputs but the key
    masks = output_dependence(inline(closed), choices=False)
    for path, mask in zip(leaf_paths({"": params}), masks, strict=True):
        if mask & data:
            raise UsageError(
                f"makes the initial value of {path or 'its parameter'} from a microbatch or the carry, "
                f"but parameters are made before there is any data: let it follow from the key alone"
            )


def _check_constants(closed: ClosedJaxpr) -> None:
    """Refuse a layer that holds a value of the trace in which it was built, beside its parameters."""
    for value in closed.consts:
        if isinstance(value, jax.core.Tracer):
            raise UsageError(
                f"keeps an array, {describe(value.aval)}, in a function or in an object that JAX does not "
                f"look into, but layers are built while JAX traces, where no array has values: make it an "
                f"attribute of the module, or a leaf of what make= returns; or compute it with NumPy"
            )


def _partition(specs: Any) -> dict[str, PartitionSpec]:
    """What a layer says of the sharding of its parameters, by path in it."""
    found, _ = jax.tree_util.tree_flatten_with_path(specs, lambda leaf: isinstance(leaf, PartitionSpec))
    return {keystr(path, simple=True, separator="."): leaf for path, leaf in found if any(leaf)}


def _texts(setting: str, given: str | Sequence[str]) -> tuple[str, ...]:
    texts = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"Pipeline: {setting}=... has {text!r}; give names of parameters, as text")
    return texts
