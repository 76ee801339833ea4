"""A pipelined step held against plain, unpipelined JAX on one device.

The objective is written down once more here, from its definition: the sum of all totals over the sum of all
weights. It is differentiated as it stands, through the weights, too, so that this shares no mistake with the
pipeline, which is cut into programs and knows of the weights that they need no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.runtime.mesh.stage_mesh import tracing_alone
from rrfp_jax.runtime.model.gradient_flow import told_lost
from rrfp_jax.runtime.model.layers import MicrobatchView, Params
from rrfp_jax.runtime.model.metrics import sum_of
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import LeafRoles, Roles, leaf_paths
from rrfp_jax.runtime.stages.memory import BucketLedger, StageLedger


@dataclass(frozen=True)
class PlainStep:
    """One step of a pipeline's model.

    Attributes:
        params: of the whole model, on the first local device.
        numbers: seed and step, which random keys follow from.
    """

    pipe: Pipeline
    params: Params
    microbatches: Sequence[Mapping[str, Any]]
    numbers: tuple[int, int]

    def value_and_grad(self) -> tuple[float, Params]:
        """Loss and gradient of all microbatches, the model compiled as one program.

        The gradient has no frozen parameters; tied ones are one argument of what is differentiated.
        """
        return self._value_and_grad(self._whole, self._owned)

    def in_pieces(self) -> tuple[float, Params]:
        """The same with every layer compiled by itself, and differentiated by itself."""
        return self._value_and_grad(_pulled_back(self._sums(jax.jit)), self._owned)

    def nearby(self) -> tuple[float, Params]:
        """The same as one program, at parameters that each are larger or smaller by one rounding."""
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> Any:
            epsilon = float(jnp.finfo(leaf.dtype).eps)  # type: ignore[no-untyped-call]
            signs = draw.choice([-epsilon, epsilon], leaf.shape)
            return (leaf.astype(_wide(leaf)) * (1 + signs)).astype(leaf.dtype)

        return self._value_and_grad(self._whole, [*map(moved, self._owned)])

    @cached_property
    def _whole(self) -> Callable[..., Any]:
        return jax.jit(_pulled_back(self._sums()))

    @cached_property
    def _roles(self) -> Roles:
        pipe = self.pipe
        return Roles.of(self.params, pipe.frozen, pipe.tied, pipe.constants(self.params))

    @cached_property
    def _places(self) -> LeafRoles:
        return self._roles.leaves(self.params)

    @cached_property
    def _leaves(self) -> list[Any]:
        # By way of the host: moved straight from a stage's mesh, an array would still name that mesh.
        return jax.device_put(jax.device_get(jax.tree.leaves(self.params)), jax.local_devices()[0])  # type: ignore[no-any-return]

    @cached_property
    def _owned(self) -> list[Any]:
        return [self._leaves[place] for place in self._places.owned]

    @cached_property
    def _sources(self) -> list[int]:
        """Where each leaf has its value from: tied ones from their owner."""
        roles, paths = self._roles, leaf_paths(self.params)
        first = {path: place for place, path in enumerate(paths)}
        return [first[roles.owners.get(path, path)] for path in paths]

    def _sums(self, compiled: Callable[[Any], Any] = lambda layer: layer) -> Callable[..., Any]:
        """(owned parameters, all parameters, fields, numbers) -> summed total and weight of a microbatch."""
        pipe, places, sources = self.pipe, self._places, self._sources
        layers = [compiled(partial(_layer, pipe, index)) for index in range(len(pipe))]

        def sums(owned: Sequence[Any], leaves: Sequence[Any], fields: Any, ids: Any) -> tuple[Any, Any]:
            values = {**dict(enumerate(leaves)), **dict(zip(places.owned, owned, strict=True))}
            tree = jax.tree.unflatten(places.structure, [values[place] for place in sources])
            carry, terms = None, []
            for index, layer in enumerate(layers):
                carry, term = layer(tree[str(index)], carry, fields, ids)
                terms += [] if term is None else [term]
            terms.append(pipe.apply_loss(carry, MicrobatchView(fields, ids, len(pipe))))
            return sum_of([term.total for term in terms]), sum_of([term.weight for term in terms])

        return sums

    def _value_and_grad(self, step: Callable[..., Any], owned: Sequence[Any]) -> tuple[float, Params]:
        total, weight = 0.0, 0.0
        zeros = [np.zeros(leaf.shape, _wide(leaf)) for leaf in owned]
        of_total, of_weight = zeros, zeros
        for j, fields in enumerate(self.microbatches):
            ids = jnp.array([*self.numbers, j], jnp.uint32)
            arrays = {name: jnp.asarray(array) for name, array in fields.items()}
            with tracing_alone():
                (part, count), first, second = step(owned, self._leaves, arrays, ids)
            total, weight = total + float(part), weight + float(count)
            of_total = [a + g.astype(a.dtype) for a, g in zip(of_total, first, strict=True)]
            of_weight = [a + g.astype(a.dtype) for a, g in zip(of_weight, second, strict=True)]
        mean, places = total / weight, self._places
        pairs = zip(places.owned, of_total, of_weight, strict=True)
        gradient = {place: jnp.asarray((a - mean * b) / weight) for place, a, b in pairs}
        return mean, places.tree(places.trained, [gradient[self._sources[i]] for i in places.trained])


def _layer(pipe: Pipeline, index: int, params: Params, carry: Any, fields: Any, ids: Any) -> Any:
    return pipe.apply_layer(index, params, carry, MicrobatchView(fields, ids, index))


def _pulled_back(sums: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the gradients of its two results by its first argument."""

    def pulled_back(owned: Any, *rest: Any) -> Any:
        found, pull = jax.vjp(lambda own: sums(own, *rest), owned)
        ones, zeros = (jax.tree.map(make, found) for make in (jnp.ones_like, jnp.zeros_like))
        # What a rule adds to whatever gradient it is given belongs to that of the total alone.
        added, of_weight = pull(zeros)[0], pull((zeros[0], ones[1]))[0]
        return found, pull((ones[0], zeros[1]))[0], jax.tree.map(jnp.subtract, of_weight, added)

    return pulled_back


def _wide(leaf: Any) -> Any:
    """What gradients are summed in, float32 at least, as a NumPy dtype."""
    return np.dtype(np.float32) if leaf.dtype.itemsize < 4 else leaf.dtype


TOLERANCES = {
    **{"float64": 1e-10, "complex128": 1e-10, "float32": 1e-5, "complex64": 1e-5},
    **{"float16": 5e-3, "bfloat16": 3e-2},
}
"""By dtype of a parameter, the share of its largest gradient by which that may be off; float8: 0.25."""

LOSS_TOLERANCE = 1e-6

SPREAD = 8
"""How many times the difference between two ways of plain JAX a pipeline may differ from one of them."""


@dataclass(frozen=True, repr=False)
class CheckReport:
    """A step against unpipelined JAX, and what each stage needs.

    Plain JAX itself gives other numbers when its layers are compiled one by one, or when parameters are off
    by a rounding: much so where a true gradient is zero, as of a key's bias in attention, or where a function
    is ill-conditioned. A difference counts only if it is larger than that.

    Attributes:
        loss: the pipeline's loss.
        loss_error: its relative difference from the reference.
        loss_limit: what that may be.
        leaf_errors: per parameter, max|g - reference| / max|reference|.
        leaf_limits: what they may be; see `TOLERANCES` and `SPREAD`.
        stages: bytes per stage.
        lost: per trained parameter that no gradient reaches although the loss follows from it, why; plain JAX
            agrees with that.
    """

    loss: float
    loss_error: float
    loss_limit: float
    leaf_errors: Mapping[str, float]
    leaf_limits: Mapping[str, float]
    stages: Sequence[StageLedger]
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most, as a share of what it may; and by how much."""
        shares = {path: error / self.leaf_limits[path] for path, error in self.leaf_errors.items()}
        path = max(shares, key=lambda path: shares[path], default="none")
        return path, self.leaf_errors.get(path, 0.0)

    @property
    def ok(self) -> bool:
        """Whether loss and gradients agree within their limits."""
        leaves = (error <= self.leaf_limits[path] for path, error in self.leaf_errors.items())
        return self.loss_error <= self.loss_limit and all(leaves)

    def __repr__(self) -> str:
        verdict = "agrees with" if self.ok else "DIFFERS FROM"
        return f"CheckReport({verdict} unpipelined JAX, loss={self.loss:.4g}, worst={self.worst[1]:.1e})"

    @property
    def text(self) -> str:
        """All of it in lines, as `Trainer.check` prints it."""
        name, error = self.worst
        verdict = "agrees with" if self.ok else "DIFFERS FROM"
        rest = f"warning: {told_lost(self.lost)}\n" if self.lost else ""
        rest += stage_table(self.stages)
        return (
            f"one step {verdict} unpipelined JAX: loss {self.loss:.6f}, relative difference "
            f"{self.loss_error:.1e}; gradients of {len(self.leaf_errors)} parameters, worst {error:.1e} "
            f"({name}, of which {self.leaf_limits.get(name, 0.0):.1e} may be)\n{rest}"
        )


def stage_table(stages: Sequence[StageLedger]) -> str:
    """What each stage needs, as text; of its largest bucket.

    "gradients" are their sums; "parked" those that wait to be added; "slots" are for messages from other
    processes; "held", "for W" (between the halves of a split backward) and "sent" are per microbatch in
    flight; "temporary" is the largest program's.
    """
    head = (
        *("stage", "layers", "device", "parameters", "weights", "optimizer", "gradients", "parked", "slots"),
        *("prepared", "held", "for W", "sent", "temporary", "compile"),
    )
    rows = [
        (
            str(index),
            " ".join(f"{first}-{end - 1}" for first, end in s.layers),
            s.device.partition(" of ")[0],
            f"{s.parameters:,}",
            *map(in_units, (s.weight_bytes, s.optimizer_bytes, s.accumulator_bytes)),
            *map(in_units, (s.parked_gradient_bytes, s.slot_bytes)),
            *map(in_units, _of_microbatch(s.largest)),
            f"{s.compile_seconds:.1f} s",
        )
        for index, s in enumerate(stages)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[cell.rjust(w) for cell, w in zip(row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join(map("  ".join, lines))


def _of_microbatch(bucket: BucketLedger) -> tuple[int, ...]:
    """Prepared, held, for W, sent, temporary."""
    chunks = bucket.chunks
    return (
        bucket.prepared_bytes,
        bucket.held_bytes,
        sum(chunk.held_after_input_bytes for chunk in chunks),
        max(max(chunk.activation_out_bytes, chunk.gradient_out_bytes) for chunk in chunks),
        max(size for chunk in chunks for size in chunk.temporary_bytes.values()),
    )


def in_units(size: int) -> str:
    """A number of bytes in MiB; in KiB where that is too few to be seen."""
    if size == 0:
        return "0"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 20 else f"{size / 2**10:.1f} KiB"


def compare(step: PlainStep, loss: float, gradient: Params, stages: Sequence[StageLedger]) -> CheckReport:
    """Hold a pipelined loss and gradient, which may be that of some layers only, against unpipelined ones."""
    expected_loss, expected = step.value_and_grad()
    others = [step.in_pieces(), step.nearby()]
    spreads = [leaf_errors({layer: other[layer] for layer in gradient}, expected) for _, other in others]
    leaves = dict(zip(leaf_paths(step.params), jax.tree.leaves(step.params), strict=True))
    errors = leaf_errors(gradient, expected)
    return CheckReport(
        loss=loss,
        loss_error=relative(loss, expected_loss),
        loss_limit=max(LOSS_TOLERANCE, *(SPREAD * relative(value, expected_loss) for value, _ in others)),
        leaf_errors=errors,
        leaf_limits={
            path: max(TOLERANCES.get(leaves[path].dtype.name, 0.25), *(SPREAD * of[path] for of in spreads))
            for path in errors
        },
        stages=stages,
    )


def relative(value: float, expected: float) -> float:
    """How far a number is from what was expected, as a share of that."""
    return abs(value - expected) / max(abs(expected), 1e-30)


def leaf_errors(gradient: Params, expected: Params) -> dict[str, float]:
    """Per parameter, max|g - expected| / max|expected|; infinite where something is not a number.

    The gradient may be that of some layers only; of spread arrays, what is in this process is compared.
    """
    expected = jax.device_get({layer: expected[layer] for layer in gradient})
    trees = jax.tree.leaves(expected), map(jnp.asarray, jax.tree.leaves(gradient))
    errors = {}
    for path, reference, got in zip(leaf_paths(expected), *trees, strict=True):
        scale = float(np.max(np.abs(reference), initial=0.0)) or 1.0
        error = max(_difference(shard, reference) for shard in got.addressable_shards) / scale
        errors[path] = math.inf if math.isnan(error) else error
    return errors


def _difference(shard: Any, reference: Any) -> float:
    """The largest between a part of an array and the same part of another."""
    own = np.asarray(shard.data).astype(np.promote_types(shard.data.dtype, np.float64))  # or complex128
    return float(np.max(np.abs(own - reference[shard.index]), initial=0.0))
