"""What tasks and transfers cost in seconds: the simulator's only knowledge of the model and the machine.

`Costs` are asked for each task's duration once, at its dispatch, and for its transfer once. Those that change
others wrap them, so they compose: `Straggler(Jittered(WorkloadCosts(...), ...), ...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import TypeAlias

from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task
from rrfp_jax.core.workload import Workload

Row: TypeAlias = tuple[float, ...]
"""Seconds by microbatch."""


class Costs(ABC):
    """How long the tasks of a step and the transfers between its stages take (s)."""

    @abstractmethod
    def duration(self, stage: int, task: Task) -> float:
        """How long `task` keeps the device of `stage` busy; a fused B as long as its I and W together."""

    @abstractmethod
    def transfer(self, stage: int, task: Task) -> float:
        """From the end of `task` on `stage` to the arrival of its output where it is needed.

        0 where that is the same stage, or nowhere.
        """

    def occupancy(self, stage: int, task: Task) -> float:
        """For how much of its transfer an output keeps the link from others, if links are serialised."""
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
        to = destination[0]
        if task.kind is FORWARD:
            return self.workload.transfer_forward[min(stage, to) if self.placement.shape == "v" else stage]
        return self.workload.transfer_backward[max(stage, to) if self.placement.shape == "v" else stage]
