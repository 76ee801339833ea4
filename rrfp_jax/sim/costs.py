"""What tasks and transfers cost in seconds: the simulator's only knowledge of the model and the machine.

`Costs` are asked for each task's duration once, at its dispatch, and for its transfer once. Those that change
others wrap them, so they compose: `Straggler(Jittered(WorkloadCosts(...), ...), ...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.core.workload import Workload


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

    def __post_init__(self) -> None:
        if self.workload.stages != self.placement.stages:
            raise ValueError(
                f"the workload has {self.workload.stages} stages, the placement {self.placement.stages}: "
                "they must be equal"
            )

    def duration(self, stage: int, task: Task) -> float:
        """See `Costs.duration`."""
        workload, (kind, _, microbatch) = self.workload, task
        if kind is FORWARD:
            seconds = workload.forward[stage][microbatch]
        elif kind is INPUT:
            seconds = workload.backward_input[stage][microbatch]
        elif kind is WEIGHT:
            seconds = workload.backward_weight[stage][microbatch]
        else:
            assert kind is BACKWARD
            seconds = workload.backward_input[stage][microbatch] + workload.backward_weight[stage][microbatch]
        return seconds / self.placement.chunks

    def transfer(self, stage: int, task: Task) -> float:
        """See `Costs.transfer`."""
        destination = self.placement.destination(stage, task)
        if destination is None or destination[0] == stage:
            return 0.0
        forward, to = task.kind is FORWARD, destination[0]
        link = stage
        if self.placement.shape == "v":
            link = min(stage, to) if forward else max(stage, to)
        table = self.workload.transfer_forward if forward else self.workload.transfer_backward
        return table[link][task.microbatch]
