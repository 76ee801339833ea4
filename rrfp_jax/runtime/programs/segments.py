"""Segments: consecutive layers of a virtual stage whose programs are compiled as one.

A segment is a pure function of flat lists. Differentiated, it gives the programs through which a microbatch
passes: forward and backward, or forward, input and weight gradient. A stage of one device has a segment for
each layer (or `Settings.layers_per_program`), and the loss is in that of the last layer. So equal layers,
wherever they are, share programs, and no gradient depends on how layers are divided among stages. What goes
from one segment to the next is what would be sent if a stage ended there. Stages of several devices are one
segment each: how values lie between layers is left to the compiler.

Each program is lowered for the places where those before it leave their results. What lowering means is
passed in: compiled for devices here, counted in `forecast/costs.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rrfp_jax.core.tasks import FORWARD, KINDS, Kind
from rrfp_jax.runtime._jax import cast_like
from rrfp_jax.runtime.autodiff.differentiate import Differentiated, differentiate, join
from rrfp_jax.runtime.autodiff.residuals import NONE, rematerialised
from rrfp_jax.runtime.autodiff.traced import SCALE, Program, Specs, without_outputs
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, WidthChanges
from rrfp_jax.runtime.model.gradient_flow import Border
from rrfp_jax.runtime.model.layers import MicrobatchView, Params
from rrfp_jax.runtime.model.metrics import Loss, Name, add_losses, in_one_vector
from rrfp_jax.runtime.model.pipeline import IDS, INDEX, WHOLE, LayerShapes, Pipeline
from rrfp_jax.runtime.model.pipeline import Specs as Fields
from rrfp_jax.runtime.model.roles import LeafRoles, Roles
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import adding, where, wide
from rrfp_jax.runtime.sizes import on_the_way

Spread: TypeAlias = Callable[[Sequence[Any], Sequence[PartitionSpec]], list[Any]]
"""Specs of leaves, and how each is partitioned -> specs with where they lie."""


def segments_of(layers: range, width: int, together: int = 1) -> list[range]:
    """The layers of each segment of a virtual stage on so many devices.

    Segments of one device begin at multiples of `together` in the model, wherever stages are cut.
    """
    first = [i for i in layers if i == layers.start or i % together == 0] if width == 1 else [layers.start]
    return [range(a, b) for a, b in pairwise([*first, layers.stop])]


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentShape:
    """One segment for microbatches of given fields.

    Its flat parameters are those of its layers, one layer after the other, and the index of the first layer.
    """

    pipe: Pipeline
    layers: range
    fields: Fields
    shapes: Sequence[LayerShapes]  # of all layers of the model
    remat: str = NONE  # what the layers' backwards compute again; see `autodiff/residuals.py`
    joined: bool = False  # whether the backward is to do what the forward would
    roles: Roles = field(default_factory=lambda: Roles(frozenset(), {}))  # all are trained
    borders: Sequence[Border] | None = None  # leaves of the carries that have one; see `gradient_flow.py`
    sharding: Sharding = field(default_factory=Sharding)  # where the stage has several devices
    ends: WidthChanges = field(default_factory=WidthChanges)
    metrics: list[Name] = field(default_factory=list, init=False)  # of the loss here, once it is traced
    _traced: dict[bool, Differentiated] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def kind(self) -> Hashable:
        """Equal for segments whose programs are alike, as long as one of them is there."""
        layers = tuple(id(self.shapes[i]) for i in self.layers)
        masks = self.trained, *self._borders
        last = self.layers.stop == len(self.pipe)
        lie = (*self._params_lie, self.ends)
        return layers, last, self.joined, tuple(None if own is None else tuple(own) for own in masks), lie

    @cached_property
    def params(self) -> list[Any]:
        """Specs, a tree a layer."""
        return [self.shapes[i].params for i in self.layers]

    @cached_property
    def leaves(self) -> list[LeafRoles]:
        """The roles of the leaves of each layer."""
        return [self.roles.leaves({str(i): self.shapes[i].params}) for i in self.layers]

    @property
    def _params_lie(self) -> list[PartitionSpec]:
        """How each parameter is partitioned."""
        named = [{str(i): self.shapes[i].params} for i in self.layers]
        return [spec for own in named for spec in self.sharding.of_params(own)]

    @property
    def _borders(self) -> tuple[Border, Border] | tuple[None, None]:
        """Of the carries that arrive and leave; None for all leaves that could have a gradient."""
        if self.borders is None:
            return None, None
        return self.borders[self.layers.start], self.borders[self.layers.stop]

    @property
    def carry_in(self) -> Any:
        """Specs of what arrives from the segment before (None for the first)."""
        return self.shapes[self.layers.start].carry_in

    @property
    def input_names(self) -> list[str]:
        """The fields in the order of a program's inputs; the numbers for random keys come after them."""
        return sorted(self.fields)

    def flat(
        self, params: Sequence[Any], carry: Sequence[Any], inputs: Sequence[Any], training: bool = True
    ) -> tuple[Any, Any, Any]:
        """The segment as a function of flat lists; see `differentiate.StageFunction`."""
        pipe, losses = self.pipe, list[Loss]()
        *leaves, first = params  # its index as random keys are to see it
        trees = jax.tree.unflatten(jax.tree.structure(self.params), leaves)
        specs, structure = jax.tree.flatten(self.carry_in)
        out: Any = jax.tree.unflatten(structure, map(cast_like, carry, specs))
        *values, ids = inputs
        named = zip(self.input_names, values, strict=True)
        fields = {name: value.astype(self.fields[name].dtype) for name, value in named}
        # A single layer whose backward does its forward holds nothing that it could compute again.
        remat = NONE if self.joined and len(self.layers) == 1 else self.remat
        for place, (index, own) in enumerate(zip(self.layers, trees, strict=True)):
            layer = rematerialised(partial(pipe.apply_layer, index), remat)
            number = first + place if place else first
            out, term = layer(own, out, MicrobatchView(fields, ids, number, training))
            losses += [] if term is None else [term]
        if self.layers.stop == len(pipe):
            losses.append(pipe.apply_loss(out, MicrobatchView(fields, ids, len(pipe), training)))
            out = None
        sent = [leaf.astype(on_the_way(leaf).dtype) for leaf in map(jnp.asarray, jax.tree.leaves(out))]
        if not losses:
            return sent, None, None
        loss = add_losses(losses)
        self.metrics[:], statistics = in_one_vector(loss)
        return sent, loss.total, statistics

    def specs(self) -> tuple[Specs, Specs, Specs]:
        """Flat specs of parameters, carry and inputs."""
        inputs = [*(on_the_way(self.fields[name]) for name in self.input_names), IDS]
        carry = list(map(on_the_way, jax.tree.leaves(self.carry_in)))
        return [*jax.tree.leaves(self.params), INDEX], carry, inputs

    @property
    def trained(self) -> list[bool]:
        """Which of the flat parameters have a gradient."""
        return [*(i in own.number for own in self.leaves for i in range(own.structure.num_leaves)), False]

    def traced(self, training: bool = True) -> Differentiated:
        """Its programs: for training, or a forward alone. They are traced once, by any thread."""
        with self._lock:
            if training not in self._traced:
                wanted = (self.trained, *self._borders) if training else ([False] * len(self.trained), (), ())
                made = differentiate(partial(self.flat, training=training), *self.specs(), *wanted)
                self._traced[training] = join(made) if self.joined and training else made
            return self._traced[training]

    def placed(self, spread: Spread) -> tuple[Specs, Specs, Specs]:
        """`specs` with where they lie."""
        params, carry, inputs = self.specs()
        return (
            spread(params, [*self._params_lie, WHOLE]),
            self._spread(spread, carry, self.ends.before),
            spread(inputs, [WHOLE] * len(inputs)),
        )

    def sent(self, spread: Spread, count: int) -> Specs:
        """The first leaves of the carry that goes on, with where they lie; the model's last sends none."""
        carry = jax.tree.leaves(self.shapes[self.layers.stop - 1].carry_out)
        return self._spread(spread, list(map(on_the_way, carry[:count])), self.ends.after)

    def _spread(self, spread: Spread, carry: Specs, resized: bool) -> Specs:
        """A carry with where it lies, at an end where the neighbour has another number of devices or not."""
        return spread(carry, [WHOLE] * len(carry) if resized else self.sharding.of_carry(carry))


def placed_params(params: Params, stage_mesh: StageMesh, sharding: Sharding) -> Params:
    """Specs of parameters, {layer index as text: tree}, with where they lie on a stage's devices."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, stage_mesh.spread(leaves, sharding.of_params(params)))


class Lowering(Protocol):
    """Makes programs of traced ones, each for values that lie somewhere."""

    def spread(self, leaves: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """Specs of leaves, with where they lie."""

    def lower(self, program: Program, given: Sequence[Any], first: Sequence[Any], sums: Sequence[Any]) -> Any:
        """The program for arguments of such specs; None if it would do nothing.

        Its first results lie as given, the others where the lowering chooses. To `sums`, specs, its last
        results are added, which are gradients.
        """

    def outputs(self, program: Program, lowered: Any) -> list[Any]:
        """Specs of its results, with where they lie."""


@dataclass(frozen=True)
class OnDevices:
    """Compiles programs for the devices of a stage."""

    compiler: Compiler

    def spread(self, leaves: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        return self.compiler.stage_mesh.spread(leaves, specs)

    def lower(
        self, program: Program, given: Sequence[Any], first: Sequence[Any], sums: Sequence[Any]
    ) -> Compiled | None:
        """See `Lowering`; one with sums takes them first, whose memory its results take."""
        if count := len(sums):
            out = [*first, *where(sums), self.compiler.stage_mesh.whole]
            donated = tuple(range(count))
            return self.compiler(adding(program.__call__, count), *sums, *given, out=out, donate=donated)
        free = len(program.closed.jaxpr.outvars) - len(first)
        out = [*first, *[None if given else self.compiler.stage_mesh.whole] * free]
        acts = out or program.closed.effects  # such as a print
        return self.compiler(program.__call__, *given, out=out) if acts else None

    def outputs(self, program: Program, lowered: Compiled | None) -> list[Any]:
        """See `Lowering`: on this stage's devices, though the program may be an equal one of another's."""
        lie = [] if lowered is None else jax.tree.leaves(lowered.output_shardings)  # type: ignore[attr-defined]
        return [
            jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self.compiler.stage_mesh.like(own))
            for spec, own in zip(program.outputs, lie, strict=True)
        ]


class SegmentSpecs(NamedTuple):
    """Of the values that its programs take and give, with where they lie; see `Differentiated`."""

    params: Specs
    layers: Sequence[tuple[Specs, int]]  # of each layer: of its parameters; how many sums it has
    prepared: Specs
    carry: Specs
    inputs: Specs
    outputs: Specs  # of the forward, with what is passed on
    cotangents: Specs
    scale: Specs
    made: Specs  # by B or I, besides sums


@dataclass(frozen=True)
class Segment:
    """The programs of a segment. What its forward would only pass on, it does not give: see `passed`."""

    traced: Differentiated
    forward: Program  # without what is passed on
    passed: Mapping[int, int]  # by place among what the whole forward gives, the argument that it is
    metrics: Sequence[Name]  # in the vector of statistics, if there is one
    prepare: Any  # computes from parameters alone, once a step, what several programs read
    lowered: Mapping[Kind, Any]
    specs: SegmentSpecs

    @classmethod
    def lower(
        cls, shape: SegmentShape, kinds: Collection[Kind], by: Lowering, before: Segment | None = None
    ) -> Segment:
        """Lower the forward and these kinds of backward, if any, but for those that `before` has."""
        traced = shape.traced(bool(kinds))
        params, carry, inputs = shape.placed(by.spread)
        given = [params[i] for i in traced.prepare.reads]
        prepare = by.lower(traced.prepare, given, (), ()) if before is None else before.prepare
        prepared = by.outputs(traced.prepare, prepare)
        sent, scale = shape.sent(by.spread, traced.out), by.spread([SCALE], [WHOLE])
        specs = [*params, *prepared, *carry, *inputs]
        passed = {i: n for i, n in traced.passed.items() if specs[n].sharding == sent[i].sharding}
        forward = without_outputs(traced.forward, passed)
        lowered: dict[Kind, Any] = {} if before is None else dict(before.lowered)
        if FORWARD not in lowered:
            first = where([spec for i, spec in enumerate(sent) if i not in passed])
            first += where(scale) if traced.gives_statistics(1) else []
            lowered[FORWARD] = by.lower(forward, [specs[i] for i in forward.reads], first, ())
        results = iter(by.outputs(forward, lowered[FORWARD]))
        count = len(traced.forward.closed.jaxpr.outvars)
        outputs = [specs[passed[i]] if i in passed else next(results) for i in range(count)]
        cotangents = [sent[i] for i in traced.moving_out]
        specs += [*outputs, *cotangents, *scale]
        sums = [wide(spec) for spec, own in zip(params, shape.trained, strict=True) if own]
        made = _lower_backwards(traced, kinds, by, specs, carry, sums, lowered)
        leaves = iter(params)
        layers = [([*islice(leaves, of.structure.num_leaves)], len(of.trained)) for of in shape.leaves]
        own = SegmentSpecs(params, layers, prepared, carry, inputs, outputs, cotangents, scale, made)
        return cls(traced, forward, passed, list(shape.metrics), prepare, lowered, own)

    def program(self, kind: Kind) -> Program:
        """What is lowered for a kind of task, after which the traced program is called."""
        return self.forward if KINDS[kind].flow > 0 else getattr(self.traced, kind.name.lower())


def _lower_backwards(
    traced: Differentiated,
    kinds: Collection[Kind],
    by: Lowering,
    specs: Sequence[Any],
    carry: Specs,
    sums: Specs,
    lowered: dict[Kind, Any],
) -> Specs:
    """Add to `lowered` what is not there; specs of what B or I gives besides sums.

    `specs` are of the whole argument list, `carry` of what arrives from the segment before.
    """
    moving = len(traced.moving_in)
    vector = traced.backward.outputs[moving : moving + traced.gives_statistics(-1)]
    made = [*(carry[i] for i in traced.moving_in), *by.spread(vector, [WHOLE] * len(vector))]
    both, first = len(made), where(made[:])
    for kind in sorted({*kinds, *lowered} - {FORWARD}):  # W takes what I gives
        program, row = getattr(traced, kind.name.lower()), KINDS[kind]
        if kind not in lowered:
            at_hand = [*specs, *made]
            given = [at_hand[i] for i in program.reads]
            lowered[kind] = by.lower(
                program, given, first if row.flow else (), sums if row.charge < 0 else ()
            )
        if row.holds is not None:
            made[both:] = by.outputs(program, lowered[kind])[both:]
    return made
