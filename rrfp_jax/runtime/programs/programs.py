"""The compiled programs of one virtual stage for one shape bucket."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax

from rrfp_jax.core.memory.footprint import Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.runtime.autodiff.differentiate import Differentiated, differentiate
from rrfp_jax.runtime.autodiff.traced import SCALE, Program, reduce
from rrfp_jax.runtime.model.metrics import Name
from rrfp_jax.runtime.model.sharding import WHOLE
from rrfp_jax.runtime.programs.adding import adding
from rrfp_jax.runtime.programs.back_to_back import BackToBack
from rrfp_jax.runtime.programs.compiling import Compiled, Compiler, results
from rrfp_jax.runtime.programs.gradients import where, wide
from rrfp_jax.runtime.programs.liveness import (
    Liveness,
    TaskProgram,
    at_forward,
    first_places,
    footprint_of,
    program_of,
)
from rrfp_jax.runtime.programs.stage_mesh import StageMesh
from rrfp_jax.runtime.programs.virtual_stage import VirtualStageShape
from rrfp_jax.runtime.sizes import nbytes, on_the_way


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

        With `halves`, a whole backward is I and W back to back; see `back_to_back.py`.
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
        first = {FORWARD: where(self._sent), WEIGHT: []}.get(kind, self._flowing)
        if kind is FORWARD and traced.has_statistics:
            first = [*first, self._compiler.stage_mesh.whole]
        if (kind is BACKWARD or kind is WEIGHT) and self.sums:
            compiled = compiled or self._compile_adding(program, first)
        else:
            free = len(program.outputs) - len(first)
            compiled = compiled or self._compile(program, [*first, *[None] * free])
        if kind is FORWARD or kind is INPUT:
            self._note(program, compiled)
        if kind is FORWARD:
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
