"""What happened in a step: a record for each task, and the figures that follow from the records.

Times are seconds on one clock. A record's `ready` is when the scheduler learned that the task could run,
`dispatched` when it was handed to the device, `start` and `end` when the device worked on it.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.step_rules import Budgets, StepRules
from rrfp_jax.core.tasks import KINDS, Input, Kind, Output, Placement, Task

if TYPE_CHECKING:
    from rrfp_jax.trace.layers import Work


class TaskRecord(NamedTuple):
    """One task of one stage, times in seconds.

    Attributes:
        bucket: numbers the microbatch's shapes.
        delayed: of the time to its end, how much at the end was injected: its device was only kept busy.
        late: of the time to `ready`, how much at the end was injected: its input was held, or noticed late.
        held: what the stage waited for when it last had nothing to run since the task before; None if it
            always had something, or nobody noted it.
    """

    stage: int
    task: Task
    bucket: int
    ready: float
    dispatched: float
    start: float
    end: float
    delayed: float = 0.0
    late: float = 0.0
    held: WaitCause | None = None

    @property
    def computed(self) -> float:
        """When its device had computed it, before what was injected (s)."""
        return self.end - self.delayed


class Transfer(NamedTuple):
    """A message from one stage to another: the tasks that sent and received it."""

    sender: TaskRecord
    receiver: TaskRecord

    @property
    def seconds(self) -> float:
        """From the end of the sender to the moment that the receiver knew, by their clocks; at least 0."""
        return max(self.receiver.ready - self.sender.end, 0.0)


RECORD = struct.Struct("<iBiiidddddd")
"""A task record in bytes: stage, kind + 16 * cause, chunk, microbatch, bucket, four times, what was injected.
Causes count from 1; 0 is for none."""

BY_NUMBER = (None, *WaitCause)
NUMBERS = {cause: number for number, cause in enumerate(BY_NUMBER)}


class Part(NamedTuple):
    """What one process recorded of a step, packed: it is sent every step and looked at seldom.

    From the dispatch of its first task to the end of its last; `busy` is the time in which each of its stages
    computed, `precision` the largest error of its times beside those of the other processes (s).
    """

    start: float
    end: float
    busy: Mapping[int, float]
    packed: bytes
    precision: float = 0.0

    @classmethod
    def of(cls, records: Sequence[TaskRecord], offset: float = 0.0, precision: float = 0.0) -> Part:
        """Pack records, at least one, all times moved by `offset` seconds, known to within `precision`."""
        busy: dict[int, float] = {}
        first, last, packed = inf, -inf, []
        for stage, task, bucket, ready, dispatched, start, end, *injected, held in records:
            kind, chunk, microbatch = task
            code = kind + 16 * NUMBERS[held]
            busy[stage] = busy.get(stage, 0.0) + end - start
            first, last = min(first, dispatched), max(last, end)
            times = (ready + offset, dispatched + offset, start + offset, end + offset)
            packed.append(RECORD.pack(stage, code, chunk, microbatch, bucket, *times, *injected))
        return cls(first + offset, last + offset, busy, b"".join(packed), precision)

    def records(self) -> list[TaskRecord]:
        """The records, in order of their end."""
        found = []
        for stage, code, chunk, microbatch, bucket, *times in RECORD.iter_unpack(self.packed):
            task, number = Task(Kind(code % 16), chunk, microbatch), code // 16
            if number >= len(BY_NUMBER):
                raise ValueError(f"{number} is not a cause of waiting")
            found.append(TaskRecord._make((stage, task, bucket, *times, BY_NUMBER[number])))
        return found


@dataclass(frozen=True)
class StepTrace:
    """One step of all stages, as the processes of one replica of the model recorded it; times on one clock.

    `busy_by_replica` has the busy seconds of all replicas, `[replica][stage]`; empty if there is only one.
    """

    step: int
    placement: Placement
    parts: Sequence[Part]
    replica: int = 0
    busy_by_replica: Sequence[Sequence[float]] = ()

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.placement.stages

    @cached_property
    def records(self) -> Sequence[TaskRecord]:
        """The records of all stages, in order of their end."""
        return sorted((r for part in self.parts for r in part.records()), key=lambda r: r.end)

    @cached_property
    def start(self) -> float:
        """Dispatch of the first task (s)."""
        return min((part.start for part in self.parts), default=inf)

    @cached_property
    def end(self) -> float:
        """End of the last task (s)."""
        return max((part.end for part in self.parts), default=-inf)

    @property
    def makespan(self) -> float:
        """From the first task's dispatch to the end of the last, over all stages (s)."""
        return self.end - self.start

    @cached_property
    def _busy(self) -> Mapping[int, float]:
        """By stage the time in which it computed (s)."""
        found: Counter[int] = Counter()
        for part in self.parts:
            found.update(part.busy)
        return found

    @cached_property
    def _by_task(self) -> Mapping[tuple[int, Task], TaskRecord]:
        return {(record.stage, record.task): record for record in self.records}

    def receiver(self, sender: TaskRecord) -> TaskRecord | None:
        """The task on another virtual stage that this one's output made ready; None if there is none."""
        return self._record_of(self.placement.destination(sender.stage, sender.task))

    def transfers(self) -> Iterator[Transfer]:
        """The messages between stages, in order of their senders' ends."""
        for sender in self.records:
            receiver = self.receiver(sender)
            if receiver is not None and receiver.stage != sender.stage:
                yield Transfer(sender, receiver)

    def sender(self, receiver: TaskRecord) -> TaskRecord | None:
        """The task on another virtual stage whose output made this one ready; None if it needs none."""
        return self._record_of(self.placement.source(receiver.stage, receiver.task.input))

    def _record_of(self, place: tuple[int, Input | Output] | None) -> TaskRecord | None:
        """A stage's task of a direction, of whichever kind; None if it is not in the trace."""
        if place is None:
            return None
        stage, (direction, chunk, microbatch) = place
        tasks = [(stage, Task(kind, chunk, microbatch)) for kind in Kind if kind.direction is direction]
        return next((self._by_task[task] for task in tasks if task in self._by_task), None)

    @cached_property
    def _by_stage(self) -> Sequence[Sequence[TaskRecord]]:
        by_stage: list[list[TaskRecord]] = [[] for _ in range(self.stages)]
        for record in sorted(self.records, key=lambda r: r.start):
            by_stage[record.stage].append(record)
        return by_stage

    def stage_records(self, stage: int) -> Sequence[TaskRecord]:
        """The records of one stage by start."""
        return self._by_stage[stage]

    def order(self, stage: int) -> list[Task]:
        """The tasks of one stage as they were dispatched."""
        return [r.task for r in sorted(self.stage_records(stage), key=lambda r: r.dispatched)]

    def busy(self, stage: int) -> float:
        """Time in which the stage computed, or was kept busy by injected delays (s)."""
        return self._busy.get(stage, 0.0)

    @property
    def busy_seconds(self) -> Sequence[Sequence[float]]:
        """Busy seconds of all stages of all replicas, `[replica][stage]`."""
        return self.busy_by_replica or [[self.busy(stage) for stage in range(self.stages)]]

    def delayed(self, stage: int) -> float:
        """The part of a stage's busy time that injected delays were (s)."""
        return sum(record.delayed for record in self.stage_records(stage))

    def bubble(self) -> list[float]:
        """Per stage, the share of the makespan in which it did not compute."""
        span = self.makespan
        return [1.0 - self.busy(stage) / span if span > 0 else 0.0 for stage in range(self.stages)]


def link_seconds(traces: Iterable[StepTrace]) -> dict[tuple[int, int], list[float]]:
    """What messages took (s), by the stages that sent and received them."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for message in chain.from_iterable(trace.transfers() for trace in traces):
        found[message.sender.stage, message.receiver.stage].append(message.seconds)
    return found


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step that ran, and what it was decided by.

    `buckets` names those of the microbatches, `grouped` says whether processes shared a stage, `lead` how
    long before a task's end the next one was queued (s), `work` what layers have to do, `ranks` those of the
    processes, per replica and stage, one after the other: both if that is known.
    """

    trace: StepTrace
    rules: StepRules
    budgets: Budgets = None
    buckets: Sequence[str]
    grouped: bool = False
    lead: float = 0.0
    work: Callable[[], Work | None] = field(default=lambda: None, compare=False, repr=False)
    ranks: Sequence[Sequence[int]] = ()

    @property
    def fixed_order(self) -> bool:
        """Whether its schedule was one, or a hint."""
        return isinstance(self.rules.schedule, FixedOrder)


def peak_in_flight(trace: StepTrace) -> list[int]:
    """Per stage, the most microbatches between the dispatches of their first F and last releasing task."""
    return [peak_of_order(trace.order(stage), trace.placement.chunks) for stage in range(trace.stages)]


def charged(order: Iterable[Task], costs: Sequence[Sequence[float]]) -> Iterator[float]:
    """What a stage is charged before its first task and after each, `costs[chunk][microbatch]` for some."""
    changes = (KINDS[kind].charge * costs[chunk][microbatch] for kind, chunk, microbatch in order)
    return accumulate(changes, initial=0)


def peak_charge(order: Iterable[Task], costs: Sequence[Sequence[float]]) -> float:
    """The most of that."""
    return max(charged(order, costs))


def peak_of_order(order: Iterable[Task], chunks: int) -> int:
    """The most microbatches that are begun and not yet released at once."""
    held = peak = 0
    to_go: dict[int, int] = {}  # releasing tasks, by microbatch
    for kind, _, microbatch in order:
        charge = KINDS[kind].charge
        if charge > 0 and microbatch not in to_go:
            to_go[microbatch] = chunks
            held += 1
            peak = max(peak, held)
        elif charge < 0:
            to_go[microbatch] -= 1
            held -= to_go[microbatch] == 0
    return peak


def peak_bytes(trace: StepTrace, activation_bytes: Sequence[Sequence[float]]) -> list[float]:
    """Per stage, the most that it held of `[stage][microbatch]`, which its chunks share equally."""
    chunks = trace.placement.chunks
    equal = [[[size / chunks for size in row]] * chunks for row in activation_bytes]
    return [peak_charge(trace.order(stage), costs) for stage, costs in enumerate(equal)]
