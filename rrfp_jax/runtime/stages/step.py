"""A stage's tasks in one step: what arrived, what each microbatch holds, which program runs on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.footprint import Meter
from rrfp_jax.core.step_rules import Bucket
from rrfp_jax.core.tasks import KINDS, Kind, Task
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.model.metrics import Reduced, add_to
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.compiler import Compiled
from rrfp_jax.runtime.programs.library import RankPrograms
from rrfp_jax.runtime.programs.stage_programs import StagePrograms, TaskProgram
from rrfp_jax.runtime.sizes import as_sent
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.trace.records import RecordedStep

Load: TypeAlias = Callable[[Sequence[frozenset[str]]], Sequence[Mapping[str, Any]]]
"""The fields wanted of each microbatch -> their arrays by name."""


class _Reading(NamedTuple):
    """What is read here of a microbatch.

    Attributes:
        fields: the names of those that any program here reads; none of another replica's.
        names: of all its fields.
        used: by stage replica of this process that sees it, the indices of what its programs read: of fields,
            then of numbers.
    """

    fields: frozenset[str]
    names: Sequence[str]
    used: Mapping[int, Sequence[int]]


class Inputs:
    """Loads what the stage replicas of this process read."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout, self._seed = layout, seed

    def reads(self, bucket: Bucket, microbatch: int, programs: RankPrograms) -> frozenset[str]:
        """The names of the fields of a microbatch that any program here reads; none of another replica's."""
        return self._reading(bucket, microbatch, programs).fields

    def load(
        self, step: int, buckets: Sequence[Bucket], programs: Sequence[RankPrograms], load: Load
    ) -> dict[int, list[list[jax.Array | None]]]:
        """Per stage replica and microbatch of its replica, the inputs that its programs read: fields, then
        numbers.
        """
        arrived: dict[int, list[list[jax.Array | None]]] = {
            number: [] for number in self._layout.stage_meshes
        }
        known: dict[tuple[Bucket, int], _Reading] = {}  # equal for microbatches of a bucket and a replica
        alike = [(bucket, j % self._layout.replicas) for j, bucket in enumerate(buckets)]
        for j, own in enumerate(alike):
            if own not in known:
                known[own] = self._reading(buckets[j], j, programs[j])
        wanted = [known[own] for own in alike]
        for j, arrays in enumerate(load([reading.fields for reading in wanted])):
            given = {name: as_sent(array) for name, array in arrays.items()}
            numbers = np.array([self._seed, step, j], IDS.dtype)
            values = [*map(given.get, wanted[j].names), numbers]
            for number, used in wanted[j].used.items():
                there = self._layout.stage_meshes[number].put_whole([values[i] for i in used])
                placed: list[jax.Array | None] = [None] * len(values)
                for i, array in zip(used, there, strict=True):
                    placed[i] = array
                arrived[number].append(placed)
        return arrived

    def _reading(self, bucket: Bucket, microbatch: int, programs: RankPrograms) -> _Reading:
        seen_by = self._layout.stages_of(microbatch % self._layout.replicas)
        used = {n: sorted({i for own in programs[n] for i in own.inputs}) for n in seen_by}
        names, every = [name for name, _, _ in bucket], {i for own in used.values() for i in own}
        return _Reading(frozenset(name for i, name in enumerate(names) if i in every), names, used)


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
        programs: Sequence[Sequence[StagePrograms]],
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
        row = KINDS[kind]
        if row.flow < 0:
            at_hand.append(self.stage.loss_scale)
        ends = row.charge < 0
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

    def _bind(self, bucket: int, chunk: int, virtual_stage: StagePrograms, leaves: Arrays) -> None:
        fixed = [*leaves]
        if virtual_stage.prepare is not None:  # what depends on parameters alone is computed once a step
            fixed += virtual_stage.prepare(*[leaves[i] for i in virtual_stage.prepare_reads])
        for kind, how in virtual_stage.tasks.items():
            head = [fixed[i] for i in how.head]
            counts = KINDS[kind].flow > 0 and virtual_stage.statistics is not None
            self._bound[bucket, chunk, kind] = _Bound(how, how.program, head, counts)


@dataclass(frozen=True)
class Sums:
    """Of a step's microbatches, in microbatch order, in float64; zeros where there are no gradients."""

    totals: Sequence[float]  # per microbatch
    weight: float
    metrics: Mapping[str, Reduced]
    hyperparams: Mapping[str, float]  # of the update that would follow, as far as they are injected
    finite: bool  # whether all gradient sums are
    squared_norm: float  # of the gradient sums over all stages; tied ones once, frozen ones not
    squared_parameter_norm: float  # of the same parameters
    recorded: RecordedStep
    peak_bytes: Sequence[int]  # by stage, the most that was there for microbatches, of any replica
    budget_bytes: Sequence[int | None]  # by stage, for that
    load_seconds: float  # of the process that waited longest for the step's data

    @property
    def total(self) -> float:
        """The step's summed loss."""
        return float(np.sum(np.asarray(self.totals, np.float64)))


def add_up(
    results: Sequence[Mapping[str, Any]],
    microbatches: int,
    recorded: RecordedStep,
    budgets: Sequence[int | None],
) -> Sums:
    """Sum what all virtual stages found of every microbatch, in the model's order, and that in theirs.

    Args:
        results: of each process: `virtual_stages`, tuples of virtual stage, microbatch, metrics and numbers
            of statistics; `norms`, tuples of stage and what `SumPrograms.norms` gives; `hyperparams`, by
            name; `peaks`, of stage replica and bytes; `load_seconds`.
        microbatches: their number.
        recorded: the step.
        budgets: bytes for microbatches, by stage replica.
    """
    stages = recorded.trace.stages
    peaks = dict(tuple(own) for result in results for own in result["peaks"])
    totals = [0.0] * microbatches
    weight, metrics = 0.0, dict[str, Reduced]()
    found = sorted(tuple(own) for result in results for own in result["virtual_stages"])
    for _, j, names, (total, counted, *numbers) in found:
        totals[j] += total
        weight += counted
        add_to(metrics, names, numbers)
    norms = [own for _, own in sorted(tuple(own) for result in results for own in result["norms"])]
    return Sums(
        totals,
        weight,
        metrics,
        next((result["hyperparams"] for result in results if result["hyperparams"]), {}),
        finite=all(math.isfinite(largest) for largest, _, _ in norms),
        squared_norm=sum(largest**2 * share for largest, share, _ in norms),
        squared_parameter_norm=sum(squares for _, _, squares in norms),
        recorded=recorded,
        peak_bytes=[max(peaks[number] for number in range(s, len(peaks), stages)) for s in range(stages)],
        budget_bytes=[_least(budgets[s::stages]) for s in range(stages)],
        load_seconds=max(result["load_seconds"] for result in results),
    )


def not_finite(stages: Mapping[int, Stage], layout: Layout) -> str:
    """Where gradient sums are not finite: the one nearest to the loss, of all processes together."""
    mine = [(number, path) for number, stage in stages.items() for path in stage.not_finite()]
    gathered = layout.world.gather("where gradients are not finite", mine)
    found = [own for part in gathered for own in part]
    if not found:  # finite in float64, too large for the norm's float32
        return "some parameter"
    number, path = max(found, key=lambda own: int(own[1].split(".")[0]))
    return f"{path} on {layout.name(number)}"


def _least(budgets: Sequence[int | None]) -> int | None:
    """Of a stage's replicas, all of which have a budget or none."""
    known = [budget for budget in budgets if budget is not None]
    return min(known, default=None)
