"""What tasks and transfers cost in seconds: the simulator's only knowledge of the model and the machine.

Durations come from a workload, from a table, or from a trace of another run; `studies/disturbances.py` has
costs that wrap others. A workload says how long each task and transfer of a step takes, for the simulator and
the paced device.

A workload is five tables of seconds, `[i][j]` being stage i and microbatch j:

    forward             F(i, j)
    backward_input      the part of the backward that the previous stage waits for
    backward_weight     the rest; the fused backward B(i, j) lasts as long as both
    transfer_forward    an activation, from stage i to i + 1; in the last row, to stage 0
    transfer_backward   a gradient, from stage i to i - 1; in the first row, to the last stage

and perhaps a sixth, of bytes:

    activation_bytes    what stage i keeps of microbatch j from its F to its release

That is one chunk a stage. Several share a stage's times equally, and with looped chunks the model goes round:
only then are the transfers between the last stage and the first read. In files the transfers may be left out,
being zero then, and `transfer_forward` may lack the last stage's row; `transfer_backward` may not be cut
short, as rows would no longer count stages.
"""

from __future__ import annotations

import math
import random
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from statistics import median
from typing import TypeAlias, TypeVar

from rrfp_jax.core.tasks import KINDS, Kind, Placement, Task
from rrfp_jax.trace.records import RecordedStep, StepTrace

T = TypeVar("T")
Table: TypeAlias = tuple[tuple[float, ...], ...]
Factors: TypeAlias = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Workload:
    """A step's durations in seconds, and what it keeps in bytes, `[stage][microbatch]`; checks itself."""

    forward: Table
    backward_input: Table
    backward_weight: Table
    transfer_forward: Table
    transfer_backward: Table
    activation_bytes: Table | None = None

    def __post_init__(self) -> None:
        if not self.forward or not self.forward[0]:
            raise ValueError("forward is empty: a workload has at least one stage and one microbatch")
        for name in _NAMES:
            self._check(name, getattr(self, name), "seconds")
        if not math.isfinite(sum(sum(row) for name in _NAMES for row in getattr(self, name))):
            raise ValueError("the times are too large: together they must be a finite number of seconds")
        if self.activation_bytes is not None:
            self._check(BYTES, self.activation_bytes, "bytes")

    def _check(self, name: str, table: Table, unit: str) -> None:
        if len(table) != self.stages:
            raise ValueError(f"{name} has {len(table)} rows, forward has {self.stages}: give one row a stage")
        for i, row in enumerate(table):
            if len(row) != self.microbatches:
                entries = f"{len(row)} entries, forward[0] has {self.microbatches}"
                raise ValueError(f"{name}[{i}] has {entries}: give every row one entry a microbatch")
            for j, time in enumerate(row):
                if not _is_time(time):
                    remedy = f"give a finite number of {unit}, at least 0"
                    raise ValueError(f"{name}[{i}][{j}] = {_shown(time)}: {remedy}")

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def microbatches(self) -> int:
        return len(self.forward[0])

    def scaled(self, forward: Factors, backward: Factors) -> Workload:
        """With the times of its forwards, and of both parts of its backwards, times `[stage][microbatch]`."""
        halves = ("backward_input", "backward_weight")
        backwards = {name: _scaled(getattr(self, name), backward) for name in halves}
        return replace(self, forward=_scaled(self.forward, forward), **backwards)

    @classmethod
    def from_json_object(cls, data: object) -> Workload:
        """The workload of a file, from what `json.load` made of it; ValueError if it is none."""
        data = _checked(dict, data, "a workload", f"give an object with {', '.join(_NAMES)}")
        if unknown := [key for key in data if key not in (*_NAMES, BYTES)]:
            raise ValueError(f"{unknown[0]!r} is not a table of a workload: use {', '.join(_NAMES)}, {BYTES}")
        if missing := [name for name in _NAMES if name not in data and not name.startswith("transfer")]:
            raise ValueError(f"{missing[0]} is missing: only the transfers may be left out of a workload")
        tables = {name: _table(name, rows) for name, rows in data.items()}
        stages = len(tables["forward"])
        zeros = _filled(stages, len(tables["forward"][0]) if stages else 0, 0.0)
        tables = dict.fromkeys(_NAMES, zeros) | tables
        if len(tables["transfer_forward"]) == stages - 1:
            tables["transfer_forward"] += zeros[-1:]
        return cls(**tables)

    def as_json_object(self) -> dict[str, list[list[float]]]:
        """All tables, as `json.dump` takes them; `from_json_object` gives back an equal workload."""
        tables = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: [list(row) for row in table] for name, table in tables.items() if table is not None}


BYTES = "activation_bytes"
_NAMES = tuple(field.name for field in fields(Workload) if field.name != BYTES)


def constant(
    stages: int, microbatches: int, forward: float, backward_ratio: float = 2.0, transfer: float = 0.0
) -> Workload:
    """Equal tasks (s); half of a backward, `backward_ratio` forwards, is for the input, half for weights."""
    half = _filled(stages, microbatches, forward * backward_ratio / 2)
    links = _filled(stages, microbatches, transfer)
    return Workload(_filled(stages, microbatches, forward), half, half, links, links)


def log_normal(
    stages: int,
    microbatches: int,
    *,
    forward: float,
    sigma: float,
    shared: float,
    seed: int,
    backward_ratio: float = 2.0,
    transfer: float = 0.0,
) -> Workload:
    """`constant`, with the time of each F and each B multiplied by a log-normal factor of mean 1.

    The factor is exp(N) with N of standard deviation `sigma`. Of N's variance the share `shared` belongs to
    the microbatch, the same on every stage and in both directions, as where lengths differ; the rest to the
    task alone. Normal draws come from `random.Random(seed).gauss`, microbatch by microbatch: that of the
    microbatch, then for each stage that of F and that of B. So a seed gives the same file again, and only
    their scale depends on `sigma` and `shared`.

    Raises:
        ValueError: `sigma` below 0 or not finite, `shared` outside 0..1, or what `constant` refuses.
    """
    if not _is_time(sigma):
        raise ValueError(f"sigma={sigma}: the standard deviation of a logarithm is finite and at least 0")
    if not 0 <= shared <= 1:
        raise ValueError(f"shared={shared}: the microbatch's share of the variance is from 0 to 1")
    mean = constant(stages, microbatches, forward, backward_ratio, transfer)
    draw = random.Random(seed).gauss
    common, own = sigma * math.sqrt(shared), sigma * math.sqrt(1 - shared)
    forwards: list[list[float]] = [[] for _ in range(stages)]
    backwards: list[list[float]] = [[] for _ in range(stages)]
    for _ in range(microbatches):
        level = common * draw(0.0, 1.0) - sigma * sigma / 2  # E exp(N) = exp(mean + variance / 2)
        for i in range(stages):
            forwards[i].append(math.exp(level + own * draw(0.0, 1.0)))
            backwards[i].append(math.exp(level + own * draw(0.0, 1.0)))
    return mean.scaled(forwards, backwards)


def _is_time(value: object) -> bool:
    """Whether it is a number >= 0 that a float can hold; JSON's true, NaN and Infinity are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= sys.float_info.max


def _shown(value: object) -> str:
    """Python writes no number of more than 4,300 digits, and nobody reads one of a hundred."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _table(name: str, rows: object) -> Table:
    """Rows of a file as tuples; their entries are checked by Workload."""
    remedy = "give a list with one entry a microbatch"
    found = enumerate(_checked(list, rows, name, "give a list with one row a stage"))
    return tuple(tuple(_checked(list, row, f"{name}[{i}]", remedy)) for i, row in found)


def _checked(kind: type[T], value: object, name: str, remedy: str) -> T:
    """What a file has, if it is a list, or an object, as it has to be."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}: {remedy}")
    return value


def _filled(stages: int, microbatches: int, time: float) -> Table:
    return ((time,) * microbatches,) * stages


def _scaled(table: Table, factors: Factors) -> Table:
    pairs = (zip(*rows, strict=True) for rows in zip(table, factors, strict=True))
    return tuple(tuple(time * factor for time, factor in row) for row in pairs)


Row: TypeAlias = tuple[float, ...]
"""Seconds by microbatch."""


class StepCosts(ABC):
    """How long the tasks of a step and the transfers between its stages take (s)."""

    @abstractmethod
    def duration(self, stage: int, task: Task) -> float:
        """How long a task keeps its device busy, a fused B as its I and W; asked at its dispatch."""

    @abstractmethod
    def transfer(self, stage: int, task: Task) -> float:
        """From the end of a task to the arrival of its output on the other stage that needs it."""

    def occupancy(self, stage: int, task: Task) -> float:
        """For how much of its transfer an output keeps the link from others, if links are serial."""
        return self.transfer(stage, task)


@dataclass(frozen=True)
class WorkloadCosts(StepCosts):
    """A workload on a placement with as many stages.

    An output takes the workload's time for the link that it crosses: on a looped placement that of the
    sender's row; on a v placement the second chunk's outputs cross the same links the other way.
    """

    workload: Workload
    placement: Placement

    def __post_init__(self) -> None:
        if self.workload.stages != self.placement.stages:
            stages = f"{self.workload.stages} stages, the placement {self.placement.stages}"
            raise ValueError(f"the workload has {stages}: they must be equal")

    @cached_property
    def _durations(self) -> Mapping[Kind, Sequence[Row]]:
        def shared(kind: Kind) -> Table:
            tables = [getattr(self.workload, KINDS[part].seconds) for part in KINDS[kind].parts]
            each = (zip(*rows, strict=True) for rows in zip(*tables, strict=True))
            return tuple(tuple(sum(times) / self.placement.chunks for times in row) for row in each)

        return {kind: shared(kind) for kind in Kind}

    @cached_property
    def _links(self) -> Mapping[Kind, Sequence[Sequence[Row | None]]]:
        stages, chunks = range(self.placement.stages), range(self.placement.chunks)
        return {kind: [[self._link(i, Task(kind, c, 0)) for c in chunks] for i in stages] for kind in Kind}

    def duration(self, stage: int, task: Task) -> float:
        kind, _, microbatch = task
        return self._durations[kind][stage][microbatch]

    def transfer(self, stage: int, task: Task) -> float:
        kind, chunk, microbatch = task
        link = self._links[kind][stage][chunk]
        return 0.0 if link is None else link[microbatch]

    def _link(self, stage: int, task: Task) -> Row | None:
        """The transfer times of a task of some kind and chunk, by microbatch; None if it has none."""
        destination = self.placement.destination(stage, task)
        if destination is None or destination[0] == stage:
            return None
        row = link_row(self.placement, stage, destination[0], task.kind)
        table: Table = getattr(self.workload, _transfers(task.kind))
        return table[row]


def _transfers(kind: Kind) -> str:
    """The table of a workload with the transfers of a kind's outputs."""
    return f"transfer_{kind.direction.name.lower()}"


def link_row(placement: Placement, stage: int, to: int, kind: Kind) -> int:
    """The row of a workload's transfers that has the link which a task's output crosses."""
    if placement.shape != "v":
        return stage
    return min(stage, to) if KINDS[kind].flow > 0 else max(stage, to)


@dataclass(frozen=True)
class TableCosts(StepCosts):
    """Durations and transfer times by (stage, task); B may be given as I and W, or these as B, half each."""

    durations: Mapping[tuple[int, Task], float]
    transfers: Mapping[tuple[int, Task], float]

    def duration(self, stage: int, task: Task) -> float:
        seconds = self.known(stage, task)
        if seconds is None:
            raise ValueError(f"the table has no duration of {task} on stage {stage}: use the same placement")
        return seconds

    def known(self, stage: int, task: Task) -> float | None:
        """The duration; None if the table has none."""
        seconds = self.durations.get((stage, task))
        if seconds is not None:
            return seconds
        whole = task.kind.whole
        fused = self.durations.get((stage, task._replace(kind=whole)))
        if fused is not None:
            return fused / len(KINDS[whole].parts)
        parts = [self.durations.get((stage, task._replace(kind=part))) for part in KINDS[task.kind].parts]
        found = [seconds for seconds in parts if seconds is not None]
        return sum(found) if len(found) == len(parts) else None

    def transfer(self, stage: int, task: Task) -> float:
        seconds = self.transfers.get((stage, task))
        if seconds is not None:
            return seconds
        kinds = (kind for kind in Kind if kind.direction is task.kind.direction)
        return max(self.transfers.get((stage, task._replace(kind=kind)), 0.0) for kind in kinds)


def recorded(trace: StepTrace) -> TableCosts:
    """The costs of a step that has run: its durations, and from each end to the moment the receiver knew."""
    transfers = {(one.sender.stage, one.sender.task): one.seconds for one in trace.transfers()}
    return TableCosts({(r.stage, r.task): r.end - r.start for r in trace.records}, transfers)


@dataclass(frozen=True, repr=False)
class CostTable:
    """By the name of each bucket, a workload of one microbatch of it (s)."""

    buckets: Mapping[str, Workload]

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ValueError("the cost table is empty: give a workload of one microbatch for each bucket")
        stages = next(iter(self.buckets.values())).stages
        for name, workload in self.buckets.items():
            if (workload.stages, workload.microbatches) != (stages, 1):
                raise ValueError(
                    f"bucket {name!r} has {workload.stages} stages and {workload.microbatches} microbatches: "
                    f"give one microbatch on the same number of stages as the others, {stages}"
                )

    def __repr__(self) -> str:
        """Short, and another for another table."""
        digest = sha256(repr(sorted(self.buckets.items())).encode()).hexdigest()[:8]
        return f"CostTable({len(self.buckets)} buckets, {digest})"

    def workload(self, names: Sequence[str]) -> Workload:
        """The workload of a step with microbatches of these buckets; ValueError if the table lacks one."""
        for name in names:
            if name not in self.buckets:
                raise ValueError(
                    f"the cost table lacks the bucket {name}; it has {'; '.join(self.buckets)}: take the "
                    f"costs.json of a run with such microbatches, or leave the costs out"
                )

        def table(part: str) -> Table:
            tables: list[Table] = [getattr(self.buckets[name], part) for name in names]
            return tuple(tuple(chain(*rows)) for rows in zip(*tables, strict=True))

        weighed = all(self.buckets[name].activation_bytes is not None for name in names)
        return Workload(**{part: table(part) for part in (*_NAMES, *([BYTES] if weighed else []))})

    @classmethod
    def from_json_object(cls, data: object) -> CostTable:
        """The table of a file, from what `json.load` made of it; ValueError if it is none."""
        found = {}
        tables = _checked(dict, data, "a cost table", "give an object with a workload a bucket")
        for name, workload in tables.items():
            try:
                found[name] = Workload.from_json_object(workload)
            except ValueError as error:
                raise ValueError(f"bucket {name!r}: {error}") from None
        return cls(found)

    def as_json_object(self) -> dict[str, dict[str, list[list[float]]]]:
        """The table as `json.dump` takes it; `from_json_object` gives back an equal one."""
        return {name: workload.as_json_object() for name, workload in self.buckets.items()}


def measured(steps: Iterable[RecordedStep]) -> CostTable | None:
    """The medians of what steps with backwards took; None without any. Halves of a fused one are alike."""
    stages = 0
    samples: dict[tuple[str, str, int], list[float]] = defaultdict(list)  # by bucket, part, stage
    for step in steps:
        trace, stages = step.trace, step.trace.stages
        sums: dict[tuple[int, str, int], float] = defaultdict(float)
        for record in trace.records:
            parts = KINDS[record.task.kind].parts
            for own in parts:
                place = record.task.microbatch, KINDS[own].seconds, record.stage
                sums[place] += (record.end - record.start) / len(parts)
        found = [*sums.items()]
        for message in trace.transfers():
            kind, _, j = message.sender.task
            row = link_row(trace.placement, message.sender.stage, message.receiver.stage, kind)
            found.append(((j, _transfers(kind), row), message.seconds))
        for (j, part, stage), seconds in found:
            samples[step.buckets[j], part, stage].append(seconds)

    def table(bucket: str, part: str) -> Table:
        return tuple((median(samples.get((bucket, part, stage), [0.0])),) for stage in range(stages))

    buckets = sorted({bucket for bucket, _, _ in samples})
    tables = {bucket: {part: table(bucket, part) for part in _NAMES} for bucket in buckets}
    return CostTable({bucket: Workload(**own) for bucket, own in tables.items()}) if tables else None


def workload_of(step: RecordedStep) -> Workload:
    """What each microbatch of a step took, chunks of a stage together; with what it was charged in bytes."""
    names = [str(j) for j in range(step.rules.microbatches)]
    table = measured([replace(step, buckets=names)])
    assert table is not None, "a step has microbatches"
    workload = table.workload(names)
    budgets = [budget for budget in step.budgets or () if budget is not None]
    if len(budgets) < workload.stages:
        return workload
    charges = tuple(tuple(map(float, map(sum, zip(*budget.costs, strict=True)))) for budget in budgets)
    return replace(workload, activation_bytes=charges)
