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
from rrfp_jax.runtime.mesh.topology import Layout
from rrfp_jax.runtime.model.metrics import Reduced, add_to
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.library import RankPrograms
from rrfp_jax.runtime.programs.stage_programs import StagePrograms, TaskProgram
from rrfp_jax.runtime.sizes import as_sent
from rrfp_jax.runtime.stages.stage import Arrays, Stage
from rrfp_jax.trace.records import RecordedStep

Load: TypeAlias = Callable[[Sequence[frozenset[str]]], Sequence[Mapping[str, Any]]]
"""The fields wanted of each microbatch -> their arrays by name."""


class Inputs:
    """Loads what the stage replicas of this process read."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout, self._seed = layout, seed

    def reads(self, bucket: Bucket, microbatch: int, programs: RankPrograms) -> frozenset[str]:
        """The names of the fields of a microbatch that any program here reads; none of another replica's."""
        replica = microbatch % self._layout.replicas
        if replica not in programs.fields:
            used = {i for number in self._layout.stages_of(replica) for i in programs.reads[number]}
            programs.fields[replica] = frozenset(name for i, (name, *_) in enumerate(bucket) if i in used)
        return programs.fields[replica]

    def load(
        self, step: int, buckets: Sequence[Bucket], programs: Sequence[RankPrograms], load: Load
    ) -> dict[int, list[list[jax.Array | None]]]:
        """Per stage replica and microbatch of its replica, what its programs read: fields, then numbers."""
        layout, arrived = self._layout, dict[int, list[list[jax.Array | None]]]()
        for number in layout.stage_meshes:
            arrived[number] = []
        wanted = [self.reads(bucket, j, programs[j]) for j, bucket in enumerate(buckets)]
        seen_by = [layout.stages_of(replica) for replica in range(layout.replicas)]
        for j, arrays in enumerate(load(wanted)):
            given = {name: as_sent(array) for name, array in arrays.items()}
            values = [given.get(name) for name, *_ in buckets[j]]
            values.append(np.array([self._seed, step, j], IDS.dtype))
            for number in seen_by[j % layout.replicas]:
                used = programs[j].reads[number]
                there = layout.stage_meshes[number].put_whole([values[i] for i in used])
                placed: list[jax.Array | None] = [None] * len(values)
                for i, array in zip(used, there, strict=True):
                    placed[i] = array
                arrived[number].append(placed)
        return arrived


class ModelStep:
    """The tasks of every microbatch on one stage: of training, or forwards only.

    Args:
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
        self._bound: dict[tuple[int, int, Kind], tuple[TaskProgram, Arrays, bool]] = {}
        for bucket, virtual_stages in enumerate(programs):
            for chunk, virtual_stage in enumerate(virtual_stages):
                self._bind(bucket, chunk, virtual_stage, stage.leaves[chunk])
        self._arrived: dict[Task, Arrays] = {}
        # values of a microbatch on a chunk; `programs/stage_programs.py` decides which, and in which order
        self._held: dict[tuple[int, int], list[Any]] = {
            (chunk, j): list(values) for j, values in enumerate(inputs) for chunk in range(len(stage.leaves))
        }
        self._parked: dict[tuple[int, int], Arrays] = {}

    def receive(self, task: Task, arrays: Arrays) -> None:
        """See `StageStep.receive`."""
        how, _, _ = self._bound[self.buckets[task.microbatch], task.chunk, task.kind]
        self._arrived[task] = self.stage.stage_mesh.copied(arrays) if how.arrives_once else arrays

    def run(self, task: Task, in_turn: bool) -> tuple[Arrays, jax.Array | None]:
        """See `StageStep.run`."""
        kind, chunk, microbatch = task
        how, head, counts = self._bound[self.buckets[microbatch], chunk, kind]
        stage_mesh, program = self.stage.stage_mesh, how.program
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
        """Choose the parameters, and what follows from them alone, that each program takes in this step."""
        fixed = [*leaves]
        if (program := virtual_stage.traced.prepare) is not None:  # computed once a step
            fixed += virtual_stage.prepare(*[leaves[i] for i in program.reads])
        for kind, how in virtual_stage.tasks.items():
            counts = KINDS[kind].flow > 0 and virtual_stage.statistics is not None
            self._bound[bucket, chunk, kind] = how, [fixed[i] for i in how.head], counts


class Norms(NamedTuple):
    """Norms of gradient sums over all stages, or zeros; tied ones count once, frozen ones not."""

    finite: bool  # whether all sums are
    squared: float
    squared_of_parameters: float  # of the same parameters


@dataclass(frozen=True)
class Sums:
    """Sums over a step's microbatches, added in microbatch order in float64."""

    totals: Sequence[float]  # per microbatch
    weight: float
    metrics: Mapping[str, Reduced]
    hyperparams: Mapping[str, float]  # of the update that would follow, as far as they are injected
    norms: Norms
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
        budgets: bytes for microbatches, by stage replica.
    """

    def told(name: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(own) for result in results for own in result[name])

    totals, weight, metrics = [0.0] * microbatches, 0.0, dict[str, Reduced]()
    for _, j, names, (total, counted, *numbers) in told("virtual_stages"):
        totals[j] += total
        weight += counted
        add_to(metrics, names, numbers)
    finite, squared, squared_of_parameters = True, 0.0, 0.0
    for _, (largest, share, squares) in told("norms"):
        finite &= math.isfinite(largest)
        squared += largest**2 * share
        squared_of_parameters += squares
    stages, hyperparams, seconds = recorded.trace.stages, dict[str, float](), 0.0
    peaks, least = [0] * stages, list[int | None]([None] * stages)
    for number, peak in told("peaks"):
        peaks[number % stages] = max(peaks[number % stages], peak)
    for number, budget in enumerate(budgets):
        known = least[number % stages]
        least[number % stages] = budget if known is None or budget is None else min(known, budget)
    for result in results:
        hyperparams = hyperparams or result["hyperparams"]
        seconds = max(seconds, result["load_seconds"])
    norms = Norms(finite, squared, squared_of_parameters)
    return Sums(totals, weight, metrics, hyperparams, norms, recorded, peaks, least, seconds)


def not_finite(stages: Mapping[int, Stage], layout: Layout) -> str:
    """Where gradient sums are not finite: the one nearest to the loss, of all processes together."""
    mine = [(number, path) for number, stage in stages.items() for path in stage.not_finite()]
    gathered = layout.world.gather("where gradients are not finite", mine)
    found = [own for part in gathered for own in part]
    if not found:  # finite in float64, too large for the norm's float32
        return "some parameter"
    number, path = max(found, key=lambda own: int(own[1].split(".")[0]))
    return f"{path} on {layout.name(number)}"
