"""The compiled programs of one virtual stage for one shape bucket.

What a microbatch holds between the programs of a virtual stage, and what each of them takes of it.

A microbatch passes through the programs of a virtual stage one after the other: forward and backward, or
forward, input and weight gradient. Between them it holds a list of arrays. Each program appends what has
arrived for it and what it computes, and leaves what later programs read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import jax

from rrfp_jax.core.footprint import Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Kind
from rrfp_jax.runtime.autodiff.differentiate import Differentiated, differentiate
from rrfp_jax.runtime.autodiff.traced import SCALE, Program, reduce
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, WidthChanges
from rrfp_jax.runtime.model.metrics import Name
from rrfp_jax.runtime.model.sharding import WHOLE
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler, results
from rrfp_jax.runtime.programs.gradients import BackToBack, adding, where, wide
from rrfp_jax.runtime.programs.virtual_stage import VirtualStageShape
from rrfp_jax.runtime.sizes import nbytes, on_the_way, temporary_bytes


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

    program: Compiled | None
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


class Numbers(NamedTuple):
    """The numbers of a microbatch's values, in the order of the programs' full argument lists.

    See `Differentiated`; parameters and prepared values, which all microbatches share, have none.

    Attributes:
        carry: what arrives for the forward.
        inputs: fields of the microbatch, and what its random keys are made of.
        outputs: of the forward: what it sends, statistics, what later programs read.
        cotangents: the gradients that arrive.
        scale: the loss scale, one value.
        halfway: outputs of I: the gradients that it sends, and what W reads.
    """

    carry: range
    inputs: range
    outputs: range
    cotangents: range
    scale: range
    halfway: range

    @classmethod
    def of(cls, *counts: int) -> Numbers:
        """From how many there are of each."""
        return cls(*(range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)))


@dataclass(frozen=True)
class Liveness:
    """Which values a microbatch holds between the programs of a virtual stage.

    Attributes:
        traced: the programs.
        kinds: of the backward: B, or I and W, or all three.
        values: specs of all values; see `Numbers`.
        arriving, fields: how many of them are carry, and inputs.
        ends: how the virtual stage meets its neighbours.
    """

    traced: Differentiated
    kinds: Collection[Kind]
    values: Sequence[Any]
    arriving: int
    fields: int
    ends: WidthChanges = field(default_factory=WidthChanges)

    @classmethod
    def unplaced(
        cls, traced: Differentiated, carry: Sequence[Any], fields: Sequence[Any], kinds: Collection[Kind]
    ) -> Liveness:
        """Of programs that nobody will run: of such values nobody knows where they lie."""
        outputs = traced.forward.outputs
        cotangents = [outputs[i] for i in traced.moving_out]
        halfway = traced.input.outputs if INPUT in kinds else []
        values = [*carry, *fields, *outputs, *cotangents, SCALE, *halfway]
        return cls(traced, kinds, values, len(carry), len(fields))

    @cached_property
    def numbers(self) -> Numbers:
        """Which value is what."""
        outputs, cotangents = len(self.traced.forward.closed.jaxpr.outvars), len(self.traced.moving_out)
        before = self.arriving, self.fields, outputs, cotangents, 1
        return Numbers.of(*before, len(self.values) - sum(before))

    @property
    def carry(self) -> list[Any]:
        """Specs of what arrives for the forward."""
        return self._specs(self.numbers.carry)

    @property
    def sent(self) -> list[Any]:
        """Specs of what the forward sends on and does not hold as well."""
        read = self._read_by(*self.kinds)
        return self._specs(i for i in self.numbers.outputs[: self.traced.out] if i not in read)

    @property
    def cotangents(self) -> list[Any]:
        """Specs of the gradients that arrive."""
        return self._specs(self.numbers.outputs[i] for i in self.traced.moving_out)

    @property
    def gradients_sent(self) -> list[Any]:
        """Specs of the gradients that are sent to the virtual stage before."""
        return self._specs(self.numbers.carry[i] for i in self.traced.moving_in)

    @cached_property
    def inputs(self) -> frozenset[int]:
        """Indices of the fields and numbers that any program reads."""
        inputs = self.numbers.inputs
        return frozenset(i - inputs.start for i in self._read_by(FORWARD, *self.kinds) if i in inputs)

    def task_programs(self, compiled: Mapping[Kind, Compiled | None]) -> dict[Kind, TaskProgram]:
        """The compiled programs with what each takes and leaves."""
        at, made = self.numbers, {}
        begin = at_forward(len(at.carry), len(at.inputs))
        program = compiled[FORWARD]
        made[FORWARD], held = self._task(FORWARD, program, begin, at.outputs, self._read_by(*self.kinds))
        at_backward = [*held, *at.cotangents, *at.scale]
        if BACKWARD in self.kinds:
            made[BACKWARD], _ = self._task(BACKWARD, compiled[BACKWARD], at_backward)
        if INPUT in self.kinds:
            later = self._read_by(WEIGHT)
            made[INPUT], held = self._task(INPUT, compiled[INPUT], at_backward, at.halfway, later)
            made[WEIGHT], _ = self._task(WEIGHT, compiled[WEIGHT], held)
        return made

    def _task(
        self,
        kind: Kind,
        program: Compiled | None,
        at_hand: Sequence[int],
        computed: Sequence[int] = (),
        later: Collection[int] = (),
    ) -> tuple[TaskProgram, list[int]]:
        """A program, and the values that are held after it.

        Args:
            kind: of its task.
            program: compiled.
            at_hand: values that are there when it runs.
            computed: values that it gives.
            later: values that programs after it read.
        """
        where = first_places([*at_hand, *computed])
        held = sorted(value for value in where if value in later)
        flow, ends = KINDS[kind].flow, (self.ends.before, self.ends.after)
        once = ends if flow > 0 else ends[::-1]
        made = TaskProgram(
            program=program,
            head=[i for i in program_of(self.traced, kind).reads if i < self.traced.fixed],
            arrives=self.carry if flow > 0 else self.cotangents if flow else [],
            takes=[where[i] for i in self._reads(kind)],
            sends=self.traced.out if flow > 0 else len(self.traced.moving_in) if flow else 0,
            arrives_once=once[0],
            sends_once=once[1],
            keeps=[where[i] for i in held],
            held_bytes=self._bytes(held),
            dropped_bytes=self._bytes(set(at_hand) - set(held)),
        )
        return made, held

    def _bytes(self, values: Collection[int]) -> int:
        """Of values, without data and the loss scale, which are not of a microbatch in flight."""
        shared = {*self.numbers.inputs, *self.numbers.scale}
        return nbytes(self._specs(i for i in values if i not in shared))

    def _specs(self, values: Iterable[int]) -> list[Any]:
        return [self.values[i] for i in values]

    def _reads(self, kind: Kind) -> list[int]:
        """The values that a program reads, in the order of its arguments."""
        fixed = self.traced.fixed
        return [i - fixed for i in program_of(self.traced, kind).reads if i >= fixed]

    def _read_by(self, *kinds: Kind) -> set[int]:
        return {value for kind in kinds for value in self._reads(kind)}


def program_of(traced: Differentiated, kind: Kind) -> Program:
    """The traced program of a kind of task."""
    found: Program = getattr(traced, kind.name.lower())  # they are called like the kinds
    return found


def at_forward(carry: int, fields: int) -> list[int]:
    """The values at hand when a forward runs: its fields from the start, its carry has arrived."""
    return [*range(carry, carry + fields), *range(carry)]


def footprint_of(
    tasks: Mapping[Kind, TaskProgram],
    carry: Sequence[Any],
    sent: Sequence[Any],
    cotangents: Sequence[Any] = (),
    gradients_sent: Sequence[Any] = (),
) -> Footprint:
    """What a microbatch takes, from its programs.

    Args:
        tasks: its programs, by kind.
        carry: specs of what arrives for the forward.
        sent: of what the forward only sends on.
        cotangents, gradients_sent: of the gradients that arrive and are sent.
    """
    return Footprint(
        activation_in_bytes=nbytes(carry),
        activation_out_bytes=nbytes(sent),
        gradient_in_bytes=nbytes(cotangents),
        gradient_out_bytes=nbytes(gradients_sent),
        held_after_forward_bytes=tasks[FORWARD].held_bytes,
        held_after_input_bytes=tasks[INPUT].held_bytes if INPUT in tasks else 0,
        temporary_bytes={kind.letter: task.temporary_bytes for kind, task in tasks.items()},
        dropped_bytes={kind.letter: task.dropped_bytes for kind, task in tasks.items()},
    )


def first_places(values: Sequence[int]) -> dict[int, int]:
    """Where in a list of values each one comes first."""
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        places.setdefault(value, place)
    return places


@dataclass(frozen=True, kw_only=True)
class VirtualStagePrograms:
    """What a virtual stage runs for one bucket.

    Attributes:
        traced: what was compiled, None for forwards only.
        prepare: computes from parameters (`prepare_reads`) alone, once a step, what several programs read.
        compiled: all programs that there are, by kind of task.
        tasks: those that the schedule runs; of a forward-only virtual stage, the forward.
        statistics: the metrics in the vector that a forward gives besides; None if it gives none.
        inputs: indices of the inputs (fields, then numbers) that any program reads.
        prepared_bytes: what `prepare` gives.
        footprint: what a microbatch takes of the stage's memory.
    """

    traced: Differentiated | None
    prepare: Compiled | None
    prepare_reads: Sequence[int]
    compiled: Mapping[Kind, Compiled | None]
    tasks: Mapping[Kind, TaskProgram]
    statistics: Sequence[Name] | None
    inputs: frozenset[int]
    prepared_bytes: int
    footprint: Footprint

    @classmethod
    def training(
        cls,
        shape: VirtualStageShape,
        compiler: Compiler,
        kinds: Collection[Kind],
        before: VirtualStagePrograms | None = None,
        halves: bool = False,
    ) -> VirtualStagePrograms:
        """Trace and compile the forward and these kinds of backward, unless they are there from before.

        With `halves`, a whole backward is I and W back to back; see `gradients.py`.
        """
        if before is not None and before.traced is not None:
            traced, prepare = before.traced, before.prepare
            compiled = dict(before.compiled)
        else:
            chosen = shape.trainable, shape.carry_gradients, shape.cotangents
            traced, prepare, compiled = differentiate(shape.flat, *shape.specs(), *chosen), None, {}
        made = _Chain(traced, shape, compiler)
        prepare = made.prepare(prepare)
        for kind in (FORWARD, *sorted({INPUT, WEIGHT} if halves else kinds)):  # W takes what I gives
            compiled[kind] = made.program(kind, compiled.get(kind))
        if halves and traced.backward.outputs:
            compiled[BACKWARD] = BackToBack(traced, compiled[INPUT], compiled[WEIGHT], len(made.sums))
        elif halves:
            compiled[BACKWARD] = None
        params, carry, inputs = shape.specs()
        values = made.values[traced.fixed :]
        live = Liveness(traced, kinds, values, len(carry), len(inputs), shape.ends)
        tasks = live.task_programs(compiled)
        return cls(
            traced=traced,
            prepare=prepare,
            prepare_reads=() if traced.prepare is None else traced.prepare.reads,
            compiled=compiled,
            tasks=tasks,
            statistics=shape.statistics,
            inputs=live.inputs,
            prepared_bytes=nbytes(made.values[len(params) : traced.fixed]),
            footprint=footprint_of(tasks, live.carry, live.sent, live.cotangents, live.gradients_sent),
        )

    @classmethod
    def evaluation(cls, shape: VirtualStageShape, compiler: Compiler) -> VirtualStagePrograms:
        """Trace and compile a forward without residuals."""
        placed = params, carry, inputs = shape.placed(compiler.stage_mesh)
        n, m, sends = len(params), len(params) + len(carry), 0

        def forward(*args: Any) -> list[Any]:
            nonlocal sends
            leaves, _, statistics = shape.flat(args[:n], args[n:m], args[m:], training=False)
            sends = len(leaves)
            return [*leaves, *([] if statistics is None else [statistics])]

        program = reduce(jax.make_jaxpr(forward)(*chain.from_iterable(shape.specs())))
        out = _sent(shape, compiler.stage_mesh, sends)
        where = [
            *(spec.sharding for spec in out),
            *[compiler.stage_mesh.whole] * (shape.statistics is not None),
        ]
        values = [*chain.from_iterable(placed)]
        tail = [i - n for i in program.reads if i >= n]
        places = first_places(at_forward(len(carry), len(inputs)))
        task = TaskProgram(
            program=_compile(program, compiler, values, where),
            head=[i for i in program.reads if i < n],
            arrives=carry,
            takes=[places[i] for i in tail],
            sends=sends,
            arrives_once=shape.ends.before,
            sends_once=shape.ends.after,
            keeps=(),
            held_bytes=0,
            dropped_bytes=nbytes(carry),
        )
        used = frozenset(i - len(carry) for i in tail if i >= len(carry))
        return cls(
            traced=None,
            prepare=None,
            prepare_reads=(),
            compiled={FORWARD: task.program},
            tasks={FORWARD: task},
            statistics=shape.statistics,
            inputs=used,
            prepared_bytes=0,
            footprint=footprint_of({FORWARD: task}, carry, out),
        )


class _Chain:
    """Compiles a virtual stage's programs one after the other, each for where those before leave their
    results.

    Attributes:
        values: specs, with shardings, of the full argument lists (see `Differentiated`) as far as known.
        sums: of what the programs that compute gradients add to.
    """

    def __init__(self, traced: Differentiated, shape: VirtualStageShape, compiler: Compiler) -> None:
        self._traced, self._compiler = traced, compiler
        params, carry, inputs = shape.placed(compiler.stage_mesh)
        self.values = [*params]
        self._arriving = [*carry, *inputs]
        self._sent = _sent(shape, compiler.stage_mesh, traced.out)
        self._flowing = [carry[i].sharding for i in traced.moving_in]
        trainable = shape.trainable or [True] * len(params)
        self.sums = [wide(spec) for spec, own in zip(params, trainable, strict=True) if own]

    def prepare(self, compiled: Compiled | None) -> Compiled | None:
        """The program of what depends on parameters alone, if there is any; given if it has been compiled."""
        if (program := self._traced.prepare) is not None:
            compiled = compiled or self._compile(program, [None] * len(program.outputs))
            self._note(program, compiled)
        self.values += self._arriving
        return compiled

    def program(self, kind: Kind, compiled: Compiled | None) -> Compiled | None:
        """The program of a kind of task, after those that it takes something of; given if it is there."""
        traced = self._traced
        program = program_of(traced, kind)
        row = KINDS[kind]
        first = where(self._sent) if row.flow > 0 else self._flowing if row.flow else []
        if row.flow > 0 and traced.has_statistics:
            first = [*first, self._compiler.stage_mesh.whole]
        if row.charge < 0 and self.sums:
            compiled = compiled or self._compile_adding(program, first)
        else:
            free = len(program.outputs) - len(first)
            compiled = compiled or self._compile(program, [*first, *[None] * free])
        if row.holds is not None:
            self._note(program, compiled)
        if row.flow > 0:
            self.values += [self._sent[i] for i in traced.moving_out]
            self.values += self._compiler.stage_mesh.spread([SCALE], [WHOLE])
        return compiled

    def _compile(self, program: Program, where: Sequence[Any]) -> Compiled | None:
        return _compile(program, self._compiler, self.values, where)

    def _compile_adding(self, program: Program, first: Sequence[Any]) -> Compiled:
        """Compiled as one that adds its gradients, after results that lie as in `first`, to donated sums."""
        count = len(self.sums)
        return self._compiler(
            adding(program.__call__, count),
            *self.sums,
            *[self.values[i] for i in program.reads],
            out=[*first, *where(self.sums), self._compiler.stage_mesh.whole],
            donate=tuple(range(count)),
        )

    def _note(self, program: Program, compiled: Compiled | None) -> None:
        lie = results(compiled, self._compiler.stage_mesh)
        for spec, sharding in zip(program.outputs, lie, strict=True):
            self.values.append(jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding))


def _sent(shape: VirtualStageShape, stage_mesh: StageMesh, count: int) -> list[jax.ShapeDtypeStruct]:
    """What a virtual stage sends on; the model's last virtual stage sends nothing."""
    leaves = list(map(on_the_way, jax.tree.leaves(shape.carry_out)[:count]))
    return stage_mesh.spread(leaves, shape.carry_specs(leaves, shape.ends.after))


def _compile(
    program: Program, compiler: Compiler, values: Sequence[Any], where: Sequence[Any]
) -> Compiled | None:
    """The compiled program; None if it gives nothing.

    Args:
        program: traced.
        compiler: of its stage.
        values: specs of its full argument list.
        where: the shardings of its results; None where that is the compiler's to choose.
    """
    if not program.closed.jaxpr.outvars:
        return None
    return compiler(program.__call__, *[values[i] for i in program.reads], out=[*where])
