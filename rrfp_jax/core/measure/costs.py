"""What tasks and transfers cost in seconds: the simulator's only knowledge of the model and the machine.

Durations come from a workload, from a table, or from a trace of another run; `disturbances.py` has costs that
wrap others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import TypeAlias

from rrfp_jax.core.measure.trace import StepTrace
from rrfp_jax.core.measure.workload import Workload
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task

Row: TypeAlias = tuple[float, ...]
"""Seconds by microbatch."""


class Costs(ABC):
    """How long the tasks of a step and the transfers between its stages take (s)."""

    @abstractmethod
    def duration(self, stage: int, task: Task) -> float:
        """How long `task` keeps the device of `stage` busy; a fused B as long as its I and W together.

        A simulation asks once a task, at its dispatch.
        """

    @abstractmethod
    def transfer(self, stage: int, task: Task) -> float:
        """From the end of `task` on `stage` to the arrival of its output on the other stage that needs it.

        Not asked for outputs that stay on the stage, which are there at once, or that nobody needs.
        """

    def occupancy(self, stage: int, task: Task) -> float:
        """For how much of its transfer an output keeps the link from others, if links are serial."""
        return self.transfer(stage, task)

    def begin(self) -> Costs:
        """These costs for one simulation: a fresh copy where they depend on what was asked before."""
        return self


@dataclass(frozen=True)
class WorkloadCosts(Costs):
    """A workload on a placement.

    With several chunks a stage's entry is shared equally by its chunks. An output takes the workload's time
    for the link that it crosses: on a looped placement that of the sender's row, where the otherwise unused
    `transfer_forward[last]` and `transfer_backward[0]` are the wrap-around from the last stage to the first
    and back; on a v placement the second chunk's outputs cross the same links the other way.

    Raises:
        ValueError: the workload has another number of stages than the placement.
    """

    workload: Workload
    placement: Placement
    _durations: Mapping[Kind, Sequence[Row]] = field(init=False, repr=False)
    _links: Mapping[Kind, Sequence[Sequence[Row | None]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.workload.stages != self.placement.stages:
            raise ValueError(
                f"the workload has {self.workload.stages} stages, the placement {self.placement.stages}: "
                "they must be equal"
            )
        workload = self.workload
        halves = zip(workload.backward_input, workload.backward_weight, strict=True)
        fused = [tuple(map(add, *rows)) for rows in halves]
        durations = {
            FORWARD: workload.forward,
            BACKWARD: fused,
            INPUT: workload.backward_input,
            WEIGHT: workload.backward_weight,
        }
        stages, chunks = range(self.placement.stages), range(self.placement.chunks)
        if len(chunks) > 1:
            durations = {
                kind: [tuple(seconds / len(chunks) for seconds in row) for row in table]
                for kind, table in durations.items()
            }
        links = {k: [[self._link(i, Task(k, c, 0)) for c in chunks] for i in stages] for k in Kind}
        object.__setattr__(self, "_durations", durations)
        object.__setattr__(self, "_links", links)

    def duration(self, stage: int, task: Task) -> float:
        """See `Costs.duration`."""
        kind, _, microbatch = task
        return self._durations[kind][stage][microbatch]

    def transfer(self, stage: int, task: Task) -> float:
        """See `Costs.transfer`."""
        kind, chunk, microbatch = task
        link = self._links[kind][stage][chunk]
        return 0.0 if link is None else link[microbatch]

    def _link(self, stage: int, task: Task) -> Row | None:
        """The transfer times of a task of some kind and chunk, by microbatch; None if it has none."""
        destination = self.placement.destination(stage, task)
        if destination is None or destination[0] == stage:
            return None
        row = link_row(self.placement, stage, destination[0], task.kind)
        forward = task.kind is FORWARD
        return (self.workload.transfer_forward if forward else self.workload.transfer_backward)[row]


def link_row(placement: Placement, stage: int, to: int, kind: Kind) -> int:
    """The row of a workload's transfers that has the link which a task's output crosses."""
    if placement.shape != "v":
        return stage
    return min(stage, to) if kind is FORWARD else max(stage, to)


@dataclass(frozen=True)
class TableCosts(Costs):
    """Every task's own duration, and every output's own transfer time, by (stage, task).

    A fused B that is not in the table takes as long as its I and W.
    """

    durations: Mapping[tuple[int, Task], float]
    transfers: Mapping[tuple[int, Task], float]

    def duration(self, stage: int, task: Task) -> float:
        """See `Costs.duration`.

        Raises:
            ValueError: the table does not have it.
        """
        seconds = self.durations.get((stage, task))
        if seconds is not None:
            return seconds
        halves = [self.durations.get((stage, task._replace(kind=kind))) for kind in (INPUT, WEIGHT)]
        if task.kind is not BACKWARD or None in halves:
            raise ValueError(
                f"the table has no duration of {task} on stage {stage}: use a schedule that splits the same "
                "backwards, on the same placement"
            )
        return sum(half for half in halves if half is not None)

    def transfer(self, stage: int, task: Task) -> float:
        """See `Costs.transfer`; 0 if the table does not have it."""
        return self.transfers.get((stage, task), 0.0)


def recorded(trace: StepTrace) -> TableCosts:
    """The costs of a step that has run: its durations, and from each end to the moment the receiver knew."""
    transfers = {}
    for sender in trace.records:
        receiver = trace.receiver(sender)
        if receiver is not None and receiver.stage != sender.stage:
            transfers[sender.stage, sender.task] = max(0.0, receiver.ready - sender.end)
    return TableCosts({(r.stage, r.task): r.end - r.start for r in trace.records}, transfers)
