"""The programs of one virtual stage for one shape bucket, and what a microbatch holds between them.

A microbatch passes through the programs of a virtual stage one after the other: forward and backward, or
forward, input and weight gradient. Between them it holds a list of arrays. Each program appends what has
arrived for it and what it computes, and leaves what later programs read.

Each program is lowered for the places where those before it leave their results. What lowering means is
passed in: compiled for devices here, counted in `forecast/layer_costs.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax

from rrfp_jax.core.footprint import Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Kind
from rrfp_jax.runtime.autodiff.differentiate import Differentiated
from rrfp_jax.runtime.autodiff.traced import SCALE, Program
from rrfp_jax.runtime.model.metrics import Name
from rrfp_jax.runtime.model.sharding import WHOLE
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import FusedHalves, adding, where, wide
from rrfp_jax.runtime.programs.virtual_stage import VirtualStageShape
from rrfp_jax.runtime.sizes import nbytes, temporary_bytes


class Lowering(Protocol):
    """Makes programs of traced ones, each for values that lie somewhere."""

    def spread(self, leaves: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """Specs of leaves, with where they lie."""

    def lower(self, program: Program, given: Sequence[Any], first: Sequence[Any], sums: Sequence[Any]) -> Any:
        """The program for such arguments; None if it would do nothing.

        Args:
            program: traced.
            given: specs of what it reads.
            first: where its first results lie; the others lie where the lowering chooses.
            sums: specs of what its last results, gradients, are added to.
        """

    def outputs(self, program: Program, lowered: Any) -> list[Any]:
        """Specs of its results, with where they lie."""


@dataclass(frozen=True)
class OnDevices:
    """Compiles programs for the devices of a stage."""

    compiler: Compiler

    def spread(self, leaves: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """See `Lowering`."""
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
    """The program of one kind of task, with what it takes of a microbatch and what it leaves.

    Attributes:
        program: None if there is nothing to compute.
        head: which parameters and prepared values it takes first, the same for all microbatches.
        arrives: specs of what it waits for, with their shardings.
        takes: what it takes then: indices into what the microbatch holds, followed by what has arrived.
        sends: how many of its outputs go to another virtual stage; they come first.
        arrives_once, sends_once: whether one copy is sent for all devices of a process; see `WidthChanges`.
        keeps: what is held after it: indices into what was held, arrived and computed.
        held_bytes: of that, without the microbatch's data, which is there from the step's beginning.
        dropped_bytes: of what was held or arrived, without data, and is not held any more.
    """

    program: Any
    head: Sequence[int]
    arrives: Sequence[Any]
    takes: Sequence[int]
    sends: int
    arrives_once: bool
    sends_once: bool
    keeps: Sequence[int]
    held_bytes: int
    dropped_bytes: int

    @cached_property
    def temporary_bytes(self) -> int:
        """What the program needs while it runs, besides arguments and results."""
        return temporary_bytes(self.program)


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """What a virtual stage runs for one bucket.

    Attributes:
        traced: what was lowered.
        prepare: computes from parameters (`prepare_reads`) alone, once a step, what several programs read.
        lowered: all programs that there are, by kind of task.
        tasks: those that the schedule runs; of a forward-only virtual stage, the forward.
        statistics: the metrics in the vector that a forward gives besides; None if it gives none.
        inputs: indices of the inputs (fields, then numbers) that any program reads.
        prepared_bytes: what `prepare` gives.
        footprint: what a microbatch takes of the stage's memory.
    """

    traced: Differentiated
    prepare: Any
    prepare_reads: Sequence[int]
    lowered: Mapping[Kind, Any]
    tasks: Mapping[Kind, TaskProgram]
    statistics: Sequence[Name] | None
    inputs: frozenset[int]
    prepared_bytes: int
    footprint: Footprint

    @classmethod
    def lower(
        cls,
        shape: VirtualStageShape,
        kinds: Collection[Kind],
        by: Lowering,
        before: StagePrograms | None = None,
        halves: bool = False,
    ) -> StagePrograms:
        """Trace a virtual stage; lower its forward, and these kinds of backward.

        Args:
            shape: of the virtual stage.
            kinds: none for a forward alone, which leaves nothing for a backward.
            by: what lowering means.
            before: programs of the same that need not be lowered again.
            halves: whether a whole backward is I and W back to back; see `gradients.py`.
        """
        traced = shape.traced(bool(kinds)) if before is None else before.traced
        row = _Row(shape, traced, by, before)
        row.lower(KINDS[BACKWARD].parts if halves and kinds else kinds)
        if halves and BACKWARD in kinds:
            first, second = (row.lowered[part] for part in KINDS[BACKWARD].parts)
            fused = FusedHalves(traced, first, second, len(row.sums))
            row.lowered[BACKWARD] = fused if traced.backward.outputs else None
        tasks = row.tasks(kinds)
        return cls(
            traced=traced,
            prepare=row.prepare,
            prepare_reads=() if traced.prepare is None else traced.prepare.reads,
            lowered=row.lowered,
            tasks=tasks,
            statistics=shape.statistics,
            inputs=frozenset(i - row.inputs[0] for i in row.read_by(FORWARD, *kinds) if i in row.inputs),
            prepared_bytes=nbytes(row.prepared),
            footprint=row.footprint(tasks),
        )


def program_of(traced: Differentiated, kind: Kind) -> Program:
    """The traced program of a kind of task, after which it is called."""
    found: Program = getattr(traced, kind.name.lower())
    return found


class _Edge(NamedTuple):
    """What tasks take from one neighbour and give to the other, by values' numbers.

    Attributes:
        scale: the loss scale, which comes with gradients.
        arrives_once, sends_once: see `TaskProgram`.
    """

    arrives: Sequence[int] = ()
    scale: Sequence[int] = ()
    sends: Sequence[int] = ()
    arrives_once: bool = False
    sends_once: bool = False


class _Row:
    """Lowers the programs of a virtual stage one after the other.

    Values of a microbatch are numbered in the order in which they come to be. Programs read them by way of
    `arguments`: the numbers in the part of their argument list that differs by microbatch. So a row may come
    to have several segments, each with an argument list of its own.

    Attributes:
        prepared: specs of what is computed from parameters alone.
        sums: of what gradients are added to.
        values: specs of all values, with where they lie.
        carry, inputs, cotangents, scale: numbers of what arrives, of fields and what random keys are made of,
            of gradients that arrive, and of the loss scale.
    """

    def __init__(
        self, shape: VirtualStageShape, traced: Differentiated, by: Lowering, before: StagePrograms | None
    ) -> None:
        self._traced, self._by, self._ends = traced, by, shape.ends
        self.lowered: dict[Kind, Any] = {} if before is None else dict(before.lowered)
        self.prepare, self.prepared = None, list[Any]()
        params, carry, inputs = shape.placed(by.spread)
        trainable = shape.trainable or [True] * len(params)
        self.sums = [wide(spec) for spec, own in zip(params, trainable, strict=True) if own]
        if (program := traced.prepare) is not None:
            given = [params[i] for i in program.reads]
            self.prepare = by.lower(program, given, (), ()) if before is None else before.prepare
            self.prepared = by.outputs(program, self.prepare)
        self._fixed = [*params, *self.prepared]
        self.values, self._arguments = list[Any](), list[int]()
        self.carry, self.inputs = self._number(carry), self._number(inputs)
        self._sent = shape.sent(by.spread, traced.out)
        self._spread_scale = by.spread([SCALE], [WHOLE])
        self._computed: dict[Kind, list[int]] = {}

    def lower(self, kinds: Collection[Kind]) -> None:
        """Lower the forward and these kinds of backward, but for those that are there."""
        traced, whole = self._traced, where(self._spread_scale)
        self._lower(FORWARD, [*where(self._sent), *(whole if traced.has_statistics else ())])
        self.cotangents = self._number(self._sent[i] for i in traced.moving_out)
        self.scale = self._number(self._spread_scale)
        flowing = where([self.values[self.carry[i]] for i in traced.moving_in])
        for kind in sorted(kinds):  # W takes what I gives
            self._lower(kind, flowing if KINDS[kind].flow else [])

    def _lower(self, kind: Kind, first: Sequence[Any]) -> None:
        program = program_of(self._traced, kind)
        if self.lowered.get(kind) is None:
            given = [*self._fixed, *(self.values[i] for i in self._arguments)]
            sums = self.sums if KINDS[kind].charge < 0 else ()
            self.lowered[kind] = self._by.lower(program, [given[i] for i in program.reads], first, sums)
        if KINDS[kind].holds is not None:
            self._computed[kind] = self._number(self._by.outputs(program, self.lowered[kind]))

    def _number(self, specs: Iterable[Any]) -> list[int]:
        """The numbers of further values, which are the next arguments of programs."""
        start = len(self.values)
        self.values += specs
        self._arguments += range(start, len(self.values))
        return self._arguments[start:]

    @property
    def _edges(self) -> Mapping[int, _Edge]:
        """By flow."""
        sent = self._computed[FORWARD][: self._traced.out]
        gradients = [self.carry[i] for i in self._traced.moving_in]
        before, after = self._ends.before, self._ends.after
        return {
            1: _Edge(self.carry, (), sent, before, after),
            -1: _Edge(self.cotangents, self.scale, gradients, after, before),
            0: _Edge(),
        }

    def tasks(self, kinds: Collection[Kind]) -> dict[Kind, TaskProgram]:
        """The forward and these kinds of backward, with what each takes and leaves."""
        found, edges = {}, self._edges
        held: dict[Kind | None, Sequence[int]] = {None: self.inputs}
        for kind in (FORWARD, *sorted(kinds)):
            edge, holds = edges[KINDS[kind].flow], KINDS[kind].holds is not None
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
        held_bytes = {KINDS[kind].holds: task.held_bytes for kind, task in tasks.items()}
        forward, backward = self._edges[1], self._edges[-1]
        return Footprint(
            activation_in_bytes=nbytes(self._specs(forward.arrives)),
            activation_out_bytes=nbytes(self._specs(i for i in forward.sends if i not in held)),
            gradient_in_bytes=nbytes(self._specs(backward.arrives)),
            gradient_out_bytes=nbytes(self._specs(backward.sends)),
            held_after_forward_bytes=held_bytes["held_after_forward_bytes"],
            held_after_input_bytes=held_bytes.get("held_after_input_bytes", 0),
            temporary_bytes={kind.letter: task.temporary_bytes for kind, task in tasks.items()},
            dropped_bytes={kind.letter: task.dropped_bytes for kind, task in tasks.items()},
        )

    def read_by(self, *kinds: Kind) -> set[int]:
        """Numbers of the values that programs of these kinds read."""
        return {value for kind in kinds for value in self._values_read(kind)}

    def _values_read(self, kind: Kind) -> list[int]:
        fixed = len(self._fixed)
        return [self._arguments[i - fixed] for i in program_of(self._traced, kind).reads if i >= fixed]

    def _bytes(self, values: Collection[int]) -> int:
        """Of values, without data and the loss scale, which are not of a microbatch in flight."""
        return nbytes(self._specs(i for i in values if i not in self.inputs and i not in self.scale))

    def _specs(self, values: Iterable[int]) -> list[Any]:
        return [self.values[i] for i in values]
