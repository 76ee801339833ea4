"""The programs of one virtual stage for one shape bucket, and what a microbatch holds between them.

A virtual stage, consecutive layers of the model, is a pure function of flat lists. Differentiated, it gives
the programs through which a microbatch passes: forward and backward, or forward, input and weight gradient.
Between them the microbatch holds a list of arrays. Each program appends what has arrived for it and what it
computes, and leaves what later programs read.

Each program is lowered for the places where those before it leave their results. What lowering means is
passed in: compiled for devices here, counted in `forecast/costs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rrfp_jax.core.footprint import Footprint, held_fields
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Kind, parts_of
from rrfp_jax.runtime._jax import cast_like
from rrfp_jax.runtime.autodiff.differentiate import Differentiated, differentiate
from rrfp_jax.runtime.autodiff.residuals import NONE
from rrfp_jax.runtime.autodiff.traced import SCALE, Program, Specs, reduce
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, WidthChanges
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.metrics import Name, kinds_of, numbers_of
from rrfp_jax.runtime.model.pipeline import IDS, LayerShapes, Pipeline, run_layers
from rrfp_jax.runtime.model.pipeline import Specs as Fields
from rrfp_jax.runtime.model.sharding import WHOLE, Sharding
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import FusedHalves, adding, where, wide
from rrfp_jax.runtime.sizes import nbytes, on_the_way, temporary_bytes

Spread: TypeAlias = Callable[[Sequence[Any], Sequence[PartitionSpec]], list[Any]]
"""Specs of leaves, and how each is partitioned -> specs with where they lie."""


@dataclass(frozen=True, kw_only=True)
class VirtualStageShape:
    """One virtual stage for microbatches of given fields; flat parameters are in leaf order."""

    pipe: Pipeline
    layers: range
    fields: Fields
    shapes: Sequence[LayerShapes]  # of all layers of the model
    remat: str = NONE  # what the layers' backwards compute again; see `autodiff/residuals.py`
    trainable: Sequence[bool] | None = None  # which parameters here have a gradient; None for all
    carry_gradients: Sequence[int] | None = None  # which leaves of the carry that arrives; None for all
    cotangents: Sequence[int] | None = None  # the same of the carry that leaves; see `gradient_flow.py`
    sharding: Sharding = field(default_factory=Sharding)  # where the stage has several devices
    ends: WidthChanges = field(default_factory=WidthChanges)
    metrics: list[Name] = field(default_factory=list, init=False)  # of the loss here, once it is traced

    @cached_property
    def params(self) -> Params:
        return {str(i): self.shapes[i].params for i in self.layers}

    @property
    def carry_in(self) -> Any:
        """Specs of what arrives from the virtual stage before (None for the first)."""
        return self.shapes[self.layers.start].carry_in

    @property
    def input_names(self) -> list[str]:
        """The fields in the order of a program's inputs; the numbers for random keys come after them."""
        return sorted(self.fields)

    def flat(
        self, params: Sequence[Any], carry: Sequence[Any], inputs: Sequence[Any], training: bool = True
    ) -> tuple[Any, Any, Any]:
        """The virtual stage as a function of flat lists; see `differentiate.StageFunction`."""
        tree = jax.tree.unflatten(jax.tree.structure(self.params), params)
        specs, structure = jax.tree.flatten(self.carry_in)
        carry = jax.tree.unflatten(structure, map(cast_like, carry, specs))
        *values, ids = inputs
        named = zip(self.input_names, values, strict=True)
        fields = {name: value.astype(self.fields[name].dtype) for name, value in named}
        own = [tree[str(i)] for i in self.layers]
        out, loss = run_layers(
            self.pipe, self.layers, own, carry, fields, ids, training=training, remat=self.remat
        )
        leaves = [leaf.astype(on_the_way(leaf).dtype) for leaf in map(jnp.asarray, jax.tree.leaves(out))]
        if loss is None:
            return leaves, None, None
        numbers = [loss.total, loss.weight]
        self.metrics[:] = kinds_of([loss.metrics]).items()
        for name, _ in self.metrics:
            numbers += numbers_of(loss.metrics[name]).values()
        real = jnp.result_type(jnp.float32, *numbers)
        return leaves, loss.total, jnp.stack([jnp.asarray(n, real) for n in numbers])

    def specs(self) -> tuple[Specs, Specs, Specs]:
        """Flat specs of parameters, carry and inputs."""
        inputs = [*(on_the_way(self.fields[name]) for name in self.input_names), IDS]
        return jax.tree.leaves(self.params), list(map(on_the_way, jax.tree.leaves(self.carry_in))), inputs

    def traced(self, training: bool) -> Differentiated:
        """Its programs: for training, or a forward alone, which leaves nothing for a backward."""
        if training:
            chosen = self.trainable, self.carry_gradients, self.cotangents
            return differentiate(self.flat, *self.specs(), *chosen)
        params, carry, _ = self.specs()
        n, m, sends = len(params), len(params) + len(carry), 0

        def forward(*args: Any) -> list[Any]:
            nonlocal sends
            leaves, _, statistics = self.flat(args[:n], args[n:m], args[m:], training=False)
            sends = len(leaves)
            return [*leaves, *([] if statistics is None else [statistics])]

        program = reduce(jax.make_jaxpr(forward)(*chain.from_iterable(self.specs())))
        return Differentiated(
            prepare=None,
            forward=program,
            backward=reduce(jax.make_jaxpr(lambda: [])()),
            out=sends,
            moving_in=(),
            moving_out=(),
            has_statistics=len(program.outputs) > sends,
            fixed=n,
            cotangents=m,
        )

    def placed(self, spread: Spread) -> tuple[Specs, Specs, Specs]:
        """`specs` with where they lie."""
        params, carry, inputs = self.specs()
        return (
            spread(params, self.sharding.of_params(self.params)),
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
        out = [*first, *[None] * free]
        return self.compiler(program.__call__, *given, out=out) if out else None

    def outputs(self, program: Program, lowered: Compiled | None) -> list[Any]:
        """See `Lowering`: on this stage's devices, though the program may be an equal one of another's."""
        lie = [] if lowered is None else jax.tree.leaves(lowered.output_shardings)  # type: ignore[attr-defined]
        return [
            jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self.compiler.stage_mesh.like(own))
            for spec, own in zip(program.outputs, lie, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class TaskProgram:
    """The program of one kind of task; bytes are without data, which is there from the step's beginning."""

    program: Any  # None if there is nothing to compute
    head: Sequence[int]  # the parameters and prepared values that it takes first, for all microbatches
    arrives: Sequence[Any]  # specs of what it waits for, with their shardings
    takes: Sequence[int]  # then: indices into what the microbatch holds, followed by what has arrived
    sends: int  # how many of its outputs go to another virtual stage; they come first
    arrives_once: bool  # whether one copy is sent for all devices of a process; see `WidthChanges`
    sends_once: bool
    keeps: Sequence[int]  # what is held after it: indices into what was held, arrived and computed
    held_bytes: int  # of that
    dropped_bytes: int  # of what was held or arrived, and is not held any more


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """What a virtual stage runs for one bucket."""

    traced: Differentiated  # what was lowered
    prepare: Any  # computes from parameters alone, once a step, what several programs read
    lowered: Mapping[Kind, Any]  # all programs that there are
    tasks: Mapping[Kind, TaskProgram]  # those that the schedule runs; forward-only, the forward
    statistics: Sequence[Name] | None  # the metrics in the vector that a forward gives besides, if any
    inputs: frozenset[int]  # indices of the inputs (fields, then numbers) that any program reads
    prepared_bytes: int
    footprint: Footprint  # what a microbatch takes of the stage's memory

    @classmethod
    def lower(
        cls,
        shape: VirtualStageShape,
        kinds: Collection[Kind],
        by: Lowering,
        before: StagePrograms | None = None,
        halves: bool = False,
    ) -> StagePrograms:
        """Trace a virtual stage; lower its forward, and these kinds of backward, if any.

        `before` has programs of the same that need not be lowered again. With `halves` a whole backward is
        I and W back to back; see `FusedHalves`.
        """
        traced = shape.traced(bool(kinds)) if before is None else before.traced
        row = _Row(shape, traced, by, before)
        names = list(shape.metrics) if traced.has_statistics else None
        row.lower(parts_of(kinds) if halves else kinds)
        if halves and BACKWARD in kinds:
            first, second = (row.lowered[part] for part in KINDS[BACKWARD].parts)
            fused = FusedHalves(traced, first, second, len(row.sums))
            row.lowered[BACKWARD] = fused if traced.backward.outputs else None
        tasks = row.tasks(kinds)
        return cls(
            traced=traced,
            prepare=row.prepare,
            lowered=row.lowered,
            tasks=tasks,
            statistics=names if before is None else before.statistics,
            inputs=frozenset(i - row.inputs[0] for i in row.read_by(FORWARD, *kinds) if i in row.inputs),
            prepared_bytes=nbytes(row.prepared),
            footprint=row.footprint(tasks),
        )


def program_of(traced: Differentiated, kind: Kind) -> Program:
    """The traced program of a kind of task, after which it is called."""
    found: Program = getattr(traced, kind.name.lower())
    return found


class _Edge(NamedTuple):
    """What tasks take from one neighbour and give to the other, by values' numbers; see `TaskProgram`."""

    arrives: Sequence[int] = ()
    scale: Sequence[int] = ()  # the loss scale, which comes with gradients
    sends: Sequence[int] = ()
    arrives_once: bool = False
    sends_once: bool = False


class _Row:
    """Lowers the programs of a virtual stage one after the other.

    Values of a microbatch are numbered in the order in which they come to be. Programs read them by way of
    `_arguments`: the numbers in the part of their argument list that differs by microbatch. So a row may come
    to have several segments, each with an argument list of its own.
    """

    def __init__(
        self, shape: VirtualStageShape, traced: Differentiated, by: Lowering, before: StagePrograms | None
    ) -> None:
        self._shape, self._traced, self._by = shape, traced, by
        self.lowered: dict[Kind, Any] = {} if before is None else dict(before.lowered)
        self.prepare, self.prepared = None, list[Any]()  # of what is computed from parameters alone, specs
        params, carry, inputs = shape.placed(by.spread)
        trainable = shape.trainable or [True] * len(params)
        self.sums = [wide(spec) for spec, own in zip(params, trainable, strict=True) if own]
        if (program := traced.prepare) is not None:
            given = [params[i] for i in program.reads]
            self.prepare = by.lower(program, given, (), ()) if before is None else before.prepare
            self.prepared = by.outputs(program, self.prepare)
        self._fixed = [*params, *self.prepared]
        self.values, self._arguments = list[Any](), list[int]()  # specs of all values, with where they lie
        self._carry, self.inputs = self._number(carry), self._number(inputs)
        self._computed: dict[Kind, list[int]] = {}
        self._edges: dict[int, _Edge] = {0: _Edge()}  # by flow

    def lower(self, kinds: Collection[Kind]) -> None:
        """Lower the forward and these kinds of backward, but for those that are there."""
        traced, ends = self._traced, self._shape.ends
        sent, scale = self._shape.sent(self._by.spread, traced.out), self._by.spread([SCALE], [WHOLE])
        self._lower(FORWARD, [*where(sent), *(where(scale) if traced.has_statistics else ())])
        cotangents, scales = self._number(sent[i] for i in traced.moving_out), self._number(scale)
        gradients, outputs = [self._carry[i] for i in traced.moving_in], self._computed[FORWARD]
        self._edges[1] = _Edge(self._carry, (), outputs[: traced.out], ends.before, ends.after)
        self._edges[-1] = _Edge(cotangents, scales, gradients, ends.after, ends.before)
        for kind in sorted(kinds):  # W takes what I gives
            self._lower(kind, where(self._specs(gradients)) if KINDS[kind].flow else [])

    def _lower(self, kind: Kind, first: Sequence[Any]) -> None:
        program = program_of(self._traced, kind)
        if self.lowered.get(kind) is None:
            given = [*self._fixed, *self._specs(self._arguments)]
            sums = self.sums if KINDS[kind].charge < 0 else ()
            self.lowered[kind] = self._by.lower(program, [given[i] for i in program.reads], first, sums)
        if KINDS[kind].holds is not None:
            self._computed[kind] = self._number(self._by.outputs(program, self.lowered[kind]))

    def _number(self, specs: Iterable[Any]) -> list[int]:
        """The numbers of further values, which are the next arguments of programs."""
        start = len(self.values)
        self.values += specs
        numbers = range(start, len(self.values))
        self._arguments += numbers
        return list(numbers)

    def tasks(self, kinds: Collection[Kind]) -> dict[Kind, TaskProgram]:
        """The forward and these kinds of backward, with what each takes and leaves."""
        found = {}
        held: dict[Kind | None, Sequence[int]] = {None: self.inputs}
        for kind in (FORWARD, *sorted(kinds)):
            edge, holds = self._edges[KINDS[kind].flow], KINDS[kind].holds is not None
            at_hand = [*held[KINDS[kind].after], *edge.arrives, *edge.scale]
            place = {value: i for i, value in enumerate([*at_hand, *self._computed.get(kind, ())])}
            later = self.read_by(*(other for other in kinds if other > kind)) if holds else ()
            held[kind] = sorted(place.keys() & later)
            reads, fixed = program_of(self._traced, kind).reads, len(self._fixed)
            found[kind] = TaskProgram(
                program=self.lowered[kind],
                head=[i for i in reads if i < fixed],
                arrives=self._specs(edge.arrives),
                takes=[place[value] for value in self._values_read(kind)],
                sends=len(edge.sends),
                arrives_once=edge.arrives_once,
                sends_once=edge.sends_once,
                keeps=[place[value] for value in held[kind]],
                held_bytes=self._bytes(held[kind]),
                dropped_bytes=self._bytes(set(at_hand) - set(held[kind])),
            )
        return found

    def footprint(self, tasks: Mapping[Kind, TaskProgram]) -> Footprint:
        """What a microbatch takes, from its programs."""
        held = self.read_by(*(kind for kind in tasks if kind > FORWARD))
        forward, backward = self._edges[1], self._edges[-1]
        return Footprint(
            activation_in_bytes=nbytes(self._specs(forward.arrives)),
            activation_out_bytes=nbytes(self._specs(i for i in forward.sends if i not in held)),
            gradient_in_bytes=nbytes(self._specs(backward.arrives)),
            gradient_out_bytes=nbytes(self._specs(backward.sends)),
            **held_fields({kind: task.held_bytes for kind, task in tasks.items()}),
            temporary_bytes={kind.letter: temporary_bytes(task.program) for kind, task in tasks.items()},
            dropped_bytes={kind.letter: task.dropped_bytes for kind, task in tasks.items()},
        )

    def read_by(self, *kinds: Kind) -> set[int]:
        """Numbers of the values that programs of these kinds read."""
        return {value for kind in kinds for value in self._values_read(kind)}

    def _values_read(self, kind: Kind) -> list[int]:
        fixed = len(self._fixed)
        return [self._arguments[i - fixed] for i in program_of(self._traced, kind).reads if i >= fixed]

    def _bytes(self, values: Collection[int]) -> int:
        """Bytes of values, without data and the loss scale, which are not of a microbatch in flight."""
        others = {*self.inputs, *self._edges[-1].scale}
        return nbytes(self._specs(i for i in values if i not in others))

    def _specs(self, values: Iterable[int]) -> list[Any]:
        return [self.values[i] for i in values]
