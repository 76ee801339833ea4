"""A stage's tasks in one step: what arrived, what each microbatch holds, which program runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from rrfp_jax.core.memory.meter import Meter
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Task
from rrfp_jax.runtime.programs.compiling import Compiled
from rrfp_jax.runtime.programs.liveness import TaskProgram
from rrfp_jax.runtime.programs.programs import VirtualStagePrograms
from rrfp_jax.runtime.stages.stage import Stage

Arrays: TypeAlias = Sequence[jax.Array]


class _Bound(NamedTuple):
    """A task's program with the parameters and prepared values that it takes in this step."""

    how: TaskProgram  # what it takes of a microbatch, and leaves
    program: Compiled | None
    head: Sequence[jax.Array]
    counts: bool  # whether a vector of statistics is the first of its outputs that stay


class ModelStep:
    """The tasks of every microbatch on one stage: of training, or forwards only.

    Args:
        stage: the stage, whose gradient sums it adds to.
        phase: for messages and expected durations.
        programs: of each bucket, those of each chunk.
        buckets: the bucket of each microbatch.
        inputs: per microbatch, what its programs read: fields, then numbers; None where none reads it.
        shapes: the number of each microbatch's bucket among those of all steps; None for `buckets`.

    Attributes:
        meter: counts what the stage holds for microbatches.
        statistics: by chunk and microbatch, the vector of numbers that its forward gave.
    """

    def __init__(
        self,
        stage: Stage,
        phase: str,
        programs: Sequence[Sequence[VirtualStagePrograms]],
        buckets: Sequence[int],
        inputs: Sequence[Sequence[jax.Array | None]],
        shapes: Sequence[int] | None = None,
    ) -> None:
        self.stage, self.phase, self.buckets = stage, phase, buckets
        self.shapes = buckets if shapes is None else shapes
        self.meter = Meter([[chunk.footprint for chunk in chunks] for chunks in programs], buckets)
        self.statistics: dict[tuple[int, int], jax.Array] = {}
        self._bound: dict[tuple[int, int, Kind], _Bound] = {}
        for bucket, virtual_stages in enumerate(programs):
            for chunk, virtual_stage in enumerate(virtual_stages):
                self._bind(bucket, chunk, virtual_stage, stage.leaves[chunk])
        self._arrived: dict[Task, Arrays] = {}
        self._held: dict[tuple[int, int], list[Any]] = {
            (chunk, j): list(values) for j, values in enumerate(inputs) for chunk in range(len(stage.leaves))
        }
        self._parked: dict[tuple[int, int], Arrays] = {}

    def receive(self, task: Task, arrays: Arrays) -> None:
        """See `StageStep.receive`."""
        how = self._bound[self.buckets[task.microbatch], task.chunk, task.kind].how
        self._arrived[task] = self.stage.stage_mesh.copied(arrays) if how.arrives_once else arrays

    def run(self, task: Task, in_turn: bool) -> tuple[Arrays, jax.Array | None]:
        """See `StageStep.run`."""
        kind, chunk, microbatch = task
        how, program, head, counts = self._bound[self.buckets[microbatch], chunk, kind]
        stage_mesh = self.stage.stage_mesh
        at_hand = self._held.pop((chunk, microbatch))
        if task in self._arrived:
            arrays = self._arrived.pop(task)
            at_hand += arrays if how.arrives_once else stage_mesh.joined(arrays, how.arrives)
        if kind is BACKWARD or kind is INPUT:
            at_hand.append(self.stage.loss_scale)
        ends = kind is BACKWARD or kind is WEIGHT
        sums: list[jax.Array] = []
        if ends:
            sums = self.stage.sums_of(chunk) if in_turn else self.stage.zeros(chunk)
        outputs = program(*sums, *head, *[at_hand[i] for i in how.takes]) if program is not None else []
        if ends:
            added = outputs[how.sends : how.sends + len(sums)]
            if in_turn:
                self.stage.put_sums(chunk, added)
            else:
                self._parked[chunk, microbatch] = added
        else:
            at_hand += outputs
            self._held[chunk, microbatch] = [at_hand[i] for i in how.keeps]
            if counts:
                self.statistics[chunk, microbatch] = outputs[how.sends]
        sent = (stage_mesh.copies if how.sends_once else stage_mesh.shards)(outputs[: how.sends])
        return sent, outputs[-1] if outputs else None

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """See `StageStep.accumulate`."""
        self.stage.add(chunk, self._parked.pop((chunk, microbatch)))

    def _bind(self, bucket: int, chunk: int, virtual_stage: VirtualStagePrograms, leaves: Arrays) -> None:
        fixed = [*leaves]
        if virtual_stage.prepare is not None:  # what depends on parameters alone is computed once a step
            fixed += virtual_stage.prepare(*[leaves[i] for i in virtual_stage.prepare_reads])
        for kind, how in virtual_stage.tasks.items():
            head = [fixed[i] for i in how.head]
            counts = kind is FORWARD and virtual_stage.statistics is not None
            self._bound[bucket, chunk, kind] = _Bound(how, how.program, head, counts)
