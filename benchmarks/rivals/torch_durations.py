"""PyTorch's schedules on tasks that last as long as they are told. Runs where PyTorch is.

    python -m benchmarks.rivals.torch_durations QUESTION ANSWER

The question: {"workload": a workload, "schedules": names, "steps": of each}; the answer: `Found` of each
schedule.

What differs from real training is what differs in our paced runs (docs/paced.md), too: a task adds 1 to its
message, and its device is busy for the time that it is told. Neither autograd nor gradients cost anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from benchmarks.rivals.found import found_in
from benchmarks.rivals.torch_pipelines import RIVALS, on_ranks, step
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Task
from rrfp_jax.runtime.engine.device import LEAD_SECONDS, precise_timers
from rrfp_jax.trace.costs import StepCosts, Workload, WorkloadCosts
from rrfp_jax.trace.records import Part, StepTrace, TaskRecord

MESSAGE_BYTES = 2**16
"""As `--message-bytes` is if nothing else is said."""

KINDS = {"full": BACKWARD, "input": INPUT, "weight": WEIGHT}
"""By PyTorch's names. It computes nothing in the I of the first virtual stage, and all of it in the W."""


class PacedDevice:
    """Stands in for an accelerator: one task at a time, each takes as long as it is told.

    PyTorch queues programs on accelerators long before they run, so what the host does between two tasks
    costs nothing there. Here a task that comes within `LEAD_SECONDS` of the end of the one before it counts
    as queued behind it, also where it waited for a message for so long, which is in PyTorch's favour.

    Args:
        stage: whose device it is.
        costs: what tasks take.

    Attributes:
        records: of the tasks since the last `begin`.
    """

    def __init__(self, stage: int, costs: StepCosts) -> None:
        self._stage, self._costs = stage, costs
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self.records: list[TaskRecord] = []
        self._free = 0.0

    def run(self, task: Task) -> None:
        """Return when the task has ended."""
        now = perf_counter()
        start = self._free if now - self._free <= LEAD_SECONDS else now
        self._free = start + self._costs.duration(self._stage, task)
        self.records.append(TaskRecord(self._stage, task, task.microbatch, now, start, start, self._free))
        sleep(max(self._free - perf_counter(), 0.0))


class PacedStage(PipelineStage):  # type: ignore[misc]  # PyTorch is not where types are checked
    """A virtual stage without a model: the schedule, its messages and its bookkeeping are PyTorch's own."""

    def __init__(self, v: int, placement: Placement, device: PacedDevice) -> None:
        message = torch.zeros(1, MESSAGE_BYTES // 4, requires_grad=True)
        count = placement.last + 1
        super().__init__(
            torch.nn.Identity(), v, count, message.device, input_args=message, output_args=message
        )
        _, self._chunk = placement.place(v)
        self._paced = device
        self._microbatch = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Note the microbatch."""
        self._microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Note the microbatch."""
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Note the microbatch."""
        self._microbatch = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> Any:
        """Instead of the model's forward."""
        return self._task(FORWARD, args[0])

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Any, ...], None]:
        """Instead of autograd."""
        arrived = bwd_kwargs.get("input_values")
        return (self._task(KINDS[backward_type], None if arrived is None else arrived[0]),), None

    def _task(self, kind: Kind, arrived: Any) -> Any:
        with torch.no_grad():
            output = None if arrived is None else arrived + 1
        self._paced.run(Task(kind, self._chunk, self._microbatch))
        return output


def paced_steps(name: str, workload: Workload, steps: int, rank: int) -> list[Part]:
    """One rank's records of some steps under a schedule."""
    rival, count = RIVALS[name], workload.microbatches
    placement = rival.placement(workload.stages)
    device = PacedDevice(rank, WorkloadCosts(workload, placement))
    own = [placement.virtual_stage(rank, chunk) for chunk in range(placement.chunks)]
    virtual_stages = [PacedStage(v, placement, device) for v in own]
    nothing = torch.zeros(())
    schedule = rival.schedule(virtual_stages, count, lambda output, target: nothing)
    inputs, targets = torch.zeros(count, MESSAGE_BYTES // 4), torch.zeros(count, 1)
    parts = []
    for _ in range(steps):
        device.begin()
        dist.barrier()
        step(schedule, virtual_stages, inputs, targets)
        parts.append(Part.of(device.records))
    return parts


def all_steps(names: Sequence[str], workload: Workload, steps: int, rank: int) -> list[list[Part]]:
    """One rank's records of the steps under each schedule."""
    with precise_timers():
        return [paced_steps(name, workload, steps, rank) for name in names]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What the schedules take; see above."""
    workload, names = Workload.from_json_object(question["workload"]), question["schedules"]
    by_rank = on_ranks(workload.stages, partial(all_steps, names, workload, question["steps"]))
    found = {}
    for name, parts_by_rank in zip(names, zip(*by_rank, strict=True), strict=True):
        placement = RIVALS[name].placement(workload.stages)
        steps = enumerate(zip(*parts_by_rank, strict=True))
        traces = [StepTrace(number, placement, parts) for number, parts in steps]
        found[name] = found_in(traces, workload)._asdict()
    return found


if __name__ == "__main__":
    asked, to = map(Path, sys.argv[1:])
    to.write_text(json.dumps(answer(json.loads(asked.read_text(encoding="utf-8")))), encoding="utf-8")
