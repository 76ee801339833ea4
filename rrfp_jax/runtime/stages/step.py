"""A stage's tasks in one step: what arrived, what each microbatch holds, which program runs on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.footprint import Chunks
from rrfp_jax.core.step_rules import Bucket, StepRules
from rrfp_jax.core.tasks import KINDS, Input, Kind, Output, Task
from rrfp_jax.runtime._jax import fetch
from rrfp_jax.runtime.mesh.topology import Layout
from rrfp_jax.runtime.model.metrics import Kind as MetricKind
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.library import Phase, RankPrograms
from rrfp_jax.runtime.programs.stage_programs import AwaitedInputs, StagePrograms, TaskProgram
from rrfp_jax.runtime.stages.memory import StepMemory
from rrfp_jax.runtime.stages.stage import Arrays, Stage
from rrfp_jax.trace.records import RecordedStep

Load: TypeAlias = Callable[[Sequence[frozenset[str]]], Sequence[Mapping[str, Any]]]
"""The fields wanted of each microbatch -> their arrays by name."""


Read: TypeAlias = Sequence[jax.Array | None]
"""What the programs of a stage read of a microbatch: fields, then numbers; None where none reads it."""


class StepPrograms(NamedTuple):
    """What follows from the rules and buckets of a step alone, for all steps with the same."""

    phase: Phase
    rules: StepRules
    buckets: Sequence[Bucket]
    names: Sequence[str]  # of the buckets
    memory: StepMemory
    programs: Sequence[RankPrograms]  # of each microbatch
    fields: Sequence[frozenset[str]]  # of each microbatch, what is read here
    readers: Sequence[Mapping[int, Sequence[int]]]  # of each, by stage replica what it reads: `RankPrograms`
    stages: Mapping[int, StagePart]

    @property
    def reads(self) -> tuple[Any, ...]:
        """What is put on the devices of a step's data."""
        return self.buckets, self.fields, self.readers


@dataclass(frozen=True, kw_only=True)
class LoadedStep:
    """A step whose data is on the devices."""

    step: int
    known: StepPrograms
    inputs: Mapping[int, Sequence[Read]]  # by stage replica, of each microbatch of its replica
    seconds: float  # that a step waited for it


class StagePart(NamedTuple):
    """A stage replica's part of a step."""

    virtual_stages: Sequence[int]  # of each chunk, its place in the model
    programs: Sequence[Sequence[StagePrograms]]  # of each bucket, those of each chunk
    buckets: Sequence[int]  # the bucket of each of its microbatches
    shapes: Sequence[int]  # its number among those of all steps


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

    def load(self, step: int, known: StepPrograms, load: Load) -> dict[int, list[Read]]:
        """By stage replica, of each microbatch of its replica, what its programs read."""
        arrived, values = dict[int, list[Read]](), list[list[Any]]()
        for j, arrays in enumerate(load(known.fields)):
            values.append([arrays.get(name) for name, *_ in known.buckets[j]])
            values[j].append(np.array([self._seed, step, j], IDS.dtype))
        for s, mesh in self._layout.stage_meshes.items():
            own = [(values[j], of[s]) for j, of in enumerate(known.readers) if s in of]
            there = iter(mesh.put_whole([of[i] for of, used in own for i in used]))  # all at once
            arrived[s] = [[next(there) if i in used else None for i in range(len(of))] for of, used in own]
        return arrived


class Meter:
    """Counts bytes held for microbatches: arriving, kept between programs, sent and not delivered."""

    def __init__(self, footprints: Sequence[Chunks], buckets: Sequence[int]) -> None:
        self._footprints, self._buckets = footprints, buckets
        self.now = self.peak = 0  # the peak is with what each program needs while it runs

    def coming(self, awaited: Input) -> None:
        """The memory of an input from another virtual stage is taken from now on."""
        direction, chunk, microbatch = awaited
        self.now += self._footprints[self._buckets[microbatch]][chunk].effects[direction][0]
        self.peak = max(self.peak, self.now)

    def came(self, awaited: Input) -> None:
        """The input of a task that was dispatched before is there, and dropped as soon as it is read."""
        direction, chunk, microbatch = awaited
        self.now -= self._footprints[self._buckets[microbatch]][chunk].effects[direction][0]

    def dispatched(self, task: Task) -> None:
        """A task's program is dispatched: its results are there, its input and what else it drops is not."""
        kind, chunk, microbatch = task
        _, _, change, transient = self._footprints[self._buckets[microbatch]][chunk].effects[kind]
        self.now += change
        self.peak = max(self.peak, self.now + transient)

    def delivered(self, sent: Output) -> None:
        """What was sent is at its destination."""
        direction, chunk, microbatch = sent
        self.now -= self._footprints[self._buckets[microbatch]][chunk].effects[direction][1]


class ModelStep:
    """The tasks of every microbatch on one stage: of training, or forwards only.

    Args:
        part: what follows from the step's rules and buckets.
        inputs: per microbatch, what its programs read.
        sums_are_final: whether nothing is added to the stage's sums but its own tasks' gradients.

    Attributes:
        meter: counts what the stage holds for microbatches.
        statistics: by task, the vector of numbers that it gave.
        norms: of the stage's gradient sums, once all have been added; see `SumPrograms.norms`.
    """

    def __init__(
        self, stage: Stage, phase: str, part: StagePart, inputs: Sequence[Read], sums_are_final: bool = False
    ) -> None:
        self.norms: jax.Array | None = None
        self._sums_are_final = sums_are_final
        self.stage, self.phase, self.buckets, self.shapes = stage, phase, part.buckets, part.shapes
        self.statistics: dict[Task, jax.Array] = {}
        self._bound: dict[tuple[int, int, Kind], tuple[TaskProgram, Arrays]] = {}
        for bucket, virtual_stages in enumerate(part.programs):
            for chunk, virtual_stage in enumerate(virtual_stages):
                self._bind(bucket, chunk, virtual_stage)
        footprints = [[own.footprint for own in virtual_stages] for virtual_stages in part.programs]
        self.meter = Meter(footprints, part.buckets)
        self._arrived: dict[Task, Arrays] = {}
        # values of a microbatch on a chunk; `programs/stage_programs.py` decides which, and in which order
        chunks, own = range(len(stage.leaves)), enumerate(inputs)
        self._held: dict[tuple[int, int], list[Any]] = {(c, j): list(of) for j, of in own for c in chunks}
        self._parked: dict[tuple[int, int], Arrays] = {}

    def receive(self, task: Task, arrays: Arrays) -> None:
        """See `StageStep.receive`."""
        how, _ = self._bound[self.buckets[task.microbatch], task.chunk, task.kind]
        self._arrived[task] = self.stage.stage_mesh.copied(arrays) if how.once.before else arrays

    def run(self, task: Task, in_turn: bool) -> tuple[Arrays, Any]:
        """See `StageStep.run`."""
        kind, chunk, microbatch = task
        how, head = self._bound[self.buckets[microbatch], chunk, kind]
        stage_mesh, program = self.stage.stage_mesh, how.program
        at_hand = self._held.pop((chunk, microbatch))
        if (arrays := self._arrived.pop(task, None)) is not None:
            at_hand += arrays if how.once.before else stage_mesh.joined(arrays, how.arrives)
        row = KINDS[kind]
        if row.flow < 0:
            at_hand.append(self.stage.loss_scale)
        ends = row.charge < 0
        sums: list[jax.Array] = []
        if ends:
            sums = self.stage.sums_of(chunk) if in_turn else self.stage.zeros(chunk)
        if program is not None:
            outputs, token = program(*sums, *head, *map(at_hand.__getitem__, how.takes))
        else:
            outputs, token = [], AwaitedInputs(arrays or ())
        given = how.sends
        if how.statistics is not None:
            self.statistics[task] = statistics = outputs[given]
            fetch(statistics)  # so that the step's end waits for the last ones only
            given += 1
        if ends:
            added = outputs[given:]
            if in_turn:
                self.stage.put_sums(chunk, added)
            else:
                self._parked[chunk, microbatch] = added
        else:
            at_hand += outputs
            self._held[chunk, microbatch] = [*map(at_hand.__getitem__, how.keeps)]
        return (stage_mesh.copies if how.once.after else stage_mesh.shards)(outputs[: how.sends]), token

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """See `StageStep.accumulate`."""
        self.stage.add(chunk, self._parked.pop((chunk, microbatch)))

    def finish(self) -> None:
        """See `StageStep.finish`."""
        if self._sums_are_final:
            self.norms = self.stage.norms()
            fetch(self.norms)

    def _bind(self, bucket: int, chunk: int, virtual_stage: StagePrograms) -> None:
        """Choose the parameters, and what follows from them alone, that each program takes in this step."""
        fixed = [*self.stage.leaves[chunk], *self.stage.indices[chunk]]
        if virtual_stage.prepare is not None:  # computed once a step
            prepared, _ = virtual_stage.prepare(*fixed)
            fixed += prepared
        for kind, how in virtual_stage.tasks.items():
            self._bound[bucket, chunk, kind] = how, [*map(fixed.__getitem__, how.head)]


@dataclass(frozen=True)
class Reduced:
    """What has been found of a metric so far, in float64; of a mean its total and weight."""

    kind: MetricKind
    numbers: Sequence[float]

    def __add__(self, other: Reduced) -> Reduced:
        """The reduction of both; numbers are added in the order of the calls."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        numbers = [float(np.maximum(a, b)) if self.kind == "max" else a + b for a, b in pairs]
        return Reduced(self.kind, numbers)

    def figure(self, weight: float) -> float:
        """What is reported, where the loss has this weight."""
        if self.kind in ("sum", "max"):
            return self.numbers[0]
        total, by = self.numbers if self.kind == "mean" else (self.numbers[0], weight)
        return total / by if by else math.nan


class Norms(NamedTuple):
    """Norms of gradient sums over all stages, or zeros; tied ones count once, frozen ones not."""

    finite: bool  # whether all sums are
    gradient: float
    squared_of_parameters: float  # of the same parameters


@dataclass(frozen=True)
class Sums:
    """Sums over a step's microbatches, added in microbatch order in float64."""

    total: float  # the step's summed loss
    totals: Sequence[float]  # per microbatch
    weight: float
    metrics: Mapping[str, Reduced]
    hyperparams: Mapping[str, float]  # of the update that would follow, as far as they are injected
    norms: Norms
    recorded: RecordedStep
    peak_bytes: Sequence[int]  # by stage, the most that was there for microbatches, of any replica
    budget_bytes: Sequence[int | None]  # by stage, for that
    load_seconds: float  # of the process that waited longest for the step's data


def add_up(found: Sequence[Mapping[str, Any]], recorded: RecordedStep, budgets: Sequence[int | None]) -> Sums:
    """Sum what all virtual stages found of every microbatch, in the model's order, and that in theirs.

    Args:
        found: by each process: `virtual_stages`, lists of virtual stage, microbatch, kind of task, metrics
            and numbers of statistics; `norms`, lists of stage and what `SumPrograms.norms` gives;
            `hyperparams`, by name; `peaks`, of stage replica and bytes; `load_seconds`.
        budgets: bytes for microbatches, by stage replica.
    """
    stages = recorded.trace.placement.stages
    hyperparams: dict[str, float] = next(filter(None, (own["hyperparams"] for own in found)), {})
    seconds = max(own["load_seconds"] for own in found)

    def rows(name: str) -> list[Any]:
        return sorted(row for own in found for row in own[name])

    totals = [0.0] * (recorded.rules.microbatches * len(budgets) // stages)
    weight, metrics = 0.0, dict[str, Reduced]()
    for _, j, _, names, (total, counted, *numbers) in rows("virtual_stages"):
        totals[j] += total
        weight += counted
        rest = iter(numbers)
        for name, kind in names:
            reduced = Reduced(kind, [*islice(rest, 1 + (kind == "mean"))])
            metrics[name] = metrics[name] + reduced if name in metrics else reduced
    norms, peaks = _norms(rows("norms")), [0] * stages
    for number, peak in rows("peaks"):
        peaks[number % stages] = max(peaks[number % stages], peak)
    least = [min((own for own in budgets[s::stages] if own is not None), default=None) for s in range(stages)]
    total = float(np.sum(np.asarray(totals, np.float64)))
    return Sums(total, totals, weight, metrics, hyperparams, norms, recorded, peaks, least, seconds)


def _norms(found: Sequence[Any]) -> Norms:
    largest_of_all = max((n for _, (n, *_) in found if math.isfinite(n)), default=0.0)
    _, exponent = math.frexp(largest_of_all)  # squares of multiples of this power of two do not overflow
    finite, squared, squared_of_parameters = True, 0.0, 0.0
    for _, (largest, share, squares) in found:
        finite &= math.isfinite(largest)
        squared += math.ldexp(largest, -exponent) ** 2 * share
        squared_of_parameters += squares
    gradient = math.sqrt(squared) * 2.0 ** (exponent - 1) * 2.0
    return Norms(finite and math.isfinite(gradient), gradient, squared_of_parameters)


def figures(metrics: Mapping[str, Reduced], weight: float) -> dict[str, float]:
    """What is reported of all metrics, in the order of their names."""
    return {name: metrics[name].figure(weight) for name in sorted(metrics)}


def not_finite(stages: Mapping[int, Stage], layout: Layout) -> str:
    """Where gradient sums are not finite: the one nearest to the loss, of all processes together."""
    mine = [(number, path) for number, stage in stages.items() for path in stage.not_finite()]
    found = [own for part in layout.world.gather("where gradients are not finite", mine) for own in part]
    if not found:  # finite in float64, too large for the norm's float32
        return "some parameter"
    number, path = max(found, key=lambda own: int(own[1].split(".")[0]))
    return f"{path} on {layout.name(number)}"
