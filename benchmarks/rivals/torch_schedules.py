"""PyTorch's pipeline schedules on tasks of given durations, and in null steps. Runs where PyTorch is.

    python -m benchmarks.rivals.torch_schedules durations|null_step QUESTION ANSWER

What differs from real training is what differs in our paced runs (benchmarks/paced.md), too: a task adds 1 to
its message, and its device is busy for the time that it is told. Autograd and gradients cost nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.rivals import common
from benchmarks.rivals.common import timed
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Placement, Shape, Task
from rrfp_jax.runtime.engine.device import LEAD_SECONDS, precise_timers
from rrfp_jax.trace.costs import StepCosts, Workload, WorkloadCosts
from rrfp_jax.trace.records import Part, StepTrace, TaskRecord

T = TypeVar("T")

LONGEST_WAIT = timedelta(seconds=60)
"""For a message; a process whose peers have died gives up then."""


@dataclass(frozen=True)
class Rival:
    """One of PyTorch's schedules.

    Attributes:
        kind: its class.
        chunks, shape: of the placements that it is for.
    """

    kind: Any
    chunks: int = 1
    shape: Shape = "looped"

    def placement(self, stages: int) -> Placement:
        return Placement(stages, self.chunks, self.shape)

    def schedule(self, stages: Sequence[Any], microbatches: int, loss: Callable[..., Any]) -> Any:
        """It, for the virtual stages of this process."""
        own = stages[0] if self.chunks == 1 else list(stages)
        return self.kind(own, microbatches, loss_fn=loss, scale_grads=False)


RIVALS = {
    "1f1b": Rival(schedules.Schedule1F1B),
    "interleaved-1f1b": Rival(schedules.ScheduleInterleaved1F1B, 2),
    "interleaved-zb": Rival(schedules.ScheduleInterleavedZeroBubble, 2),
    "zb-v": Rival(schedules.ScheduleZBVZeroBubble, 2, "v"),
    "dualpipe-v": Rival(schedules.ScheduleDualPipeV, 2, "v"),
}


def step(schedule: Any, virtual_stages: Sequence[Any], inputs: Any, targets: Any) -> None:
    """One step of a schedule; inputs and targets are those of all microbatches."""
    first = [inputs] if any(stage.is_first for stage in virtual_stages) else []
    target = targets if any(stage.is_last for stage in virtual_stages) else None
    schedule.step(*first, target=target, losses=[], return_outputs=False)


def on_ranks(count: int, names: Sequence[str], work: Callable[[str, int], T]) -> list[list[T]]:
    """What `work(name, rank)` gives for each name in so many processes that can send messages to one another.

    They are forked, so that PyTorch is imported once.
    """
    torch.set_num_threads(1)  # as cores are few, and tasks tiny
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(count, get_context("fork")) as pool,
    ):
        joined = partial(_joined, names, work, count, Path(folder) / "store")
        return list(pool.map(joined, range(count)))


def _joined(
    names: Sequence[str], work: Callable[[str, int], T], count: int, store: Path, rank: int
) -> list[T]:
    """A member of a group; nobody leaves before all are done."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=LONGEST_WAIT
    )
    try:
        with precise_timers():
            found = [work(name, rank) for name in names]
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


MESSAGE_BYTES = 2**16
"""As `--message-bytes` is if nothing else is said."""

KINDS = {"full": BACKWARD, "input": INPUT, "weight": WEIGHT}
"""By PyTorch's names. It computes nothing in the I of the first virtual stage, and all of it in the W."""


class PacedDevice:
    """Stands in for a stage's accelerator: one task at a time, each takes as long as it is told.

    PyTorch queues programs on accelerators long before they run, so what the host does between two tasks
    costs nothing there. Here a task that comes within `LEAD_SECONDS` of the end of the one before it counts
    as queued behind it, also where it waited for a message for so long, which is in PyTorch's favour.
    """

    def __init__(self, stage: int, costs: StepCosts) -> None:
        self._stage, self._costs = stage, costs
        self.begin()

    def begin(self) -> None:
        self.records: list[TaskRecord] = []
        self._free = 0.0

    def run(self, task: Task) -> None:
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
        self._microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._microbatch = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> Any:
        return self._task(FORWARD, args[0])

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Any, ...], None]:
        arrived = bwd_kwargs.get("input_values")
        return (self._task(KINDS[backward_type], None if arrived is None else arrived[0]),), None

    def _task(self, kind: Kind, arrived: Any) -> Any:
        with torch.no_grad():
            output = None if arrived is None else arrived + 1
        self._paced.run(Task(kind, self._chunk, self._microbatch))
        return output


def paced_steps(workload: Workload, steps: int, name: str, rank: int) -> list[Part]:
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


def durations(question: dict[str, Any]) -> dict[str, Any]:
    """What each schedule takes: `Timed`. The question: a "workload", "schedules" by name, "steps" of each."""
    workload, names = Workload.from_json_object(question["workload"]), question["schedules"]
    by_rank = on_ranks(workload.stages, names, partial(paced_steps, workload, question["steps"]))
    found = {}
    for name, parts_by_rank in zip(names, zip(*by_rank, strict=True), strict=True):
        placement = RIVALS[name].placement(workload.stages)
        steps = enumerate(zip(*parts_by_rank, strict=True))
        traces = [StepTrace(number, placement, parts) for number, parts in steps]
        found[name] = timed(traces, workload)._asdict()
    return found


def null_steps(name: str, rank: int) -> tuple[float, float]:
    """One rank's median step under a schedule, and its CPU per step (s)."""
    rival = RIVALS[name]
    placement = rival.placement(common.RANKS)
    own = [placement.virtual_stage(rank, chunk) for chunk in range(placement.chunks)]
    virtual_stages = [_virtual_stage(v, placement.last + 1) for v in own]
    schedule = rival.schedule(virtual_stages, common.MICROBATCHES, torch.nn.MSELoss(reduction="sum"))
    parameters = [p for stage in virtual_stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=common.LEARNING_RATE)
    inputs = torch.randn(common.MICROBATCHES * common.ROWS, common.WIDTH)
    dist.barrier()
    began, cpu = [], 0.0
    for number in range(common.WARM_UP + common.STEPS):
        if number == common.WARM_UP:
            cpu = process_time()
        began.append(perf_counter())
        step(schedule, virtual_stages, inputs, inputs)
        optimizer.step()
        optimizer.zero_grad()
    began.append(perf_counter())
    cpu = (process_time() - cpu) / common.STEPS
    took = [after - before for before, after in pairwise(began)]
    return median(took[common.WARM_UP :]), cpu


def _virtual_stage(v: int, count: int) -> Any:
    """As many of the model's layers as every virtual stage has."""
    layers = [
        module
        for _ in range(common.LAYERS // count)
        for module in (torch.nn.Linear(common.WIDTH, common.WIDTH), torch.nn.Tanh())
    ]
    return PipelineStage(torch.nn.Sequential(*layers), v, count, torch.device("cpu"))


def null_step(names: Sequence[str]) -> dict[str, Any]:
    """Of each schedule: median seconds of a "step", and "cpu" seconds of a step, of all processes."""
    columns = zip(*on_ranks(common.RANKS, names, null_steps), strict=True)
    return {
        name: {"step": own[0][0], "cpu": sum(cpu for _, cpu in own)}
        for name, own in zip(names, columns, strict=True)
    }


if __name__ == "__main__":
    what, asked, to = sys.argv[1:]
    found = (durations if what == "durations" else null_step)(
        json.loads(Path(asked).read_text(encoding="utf-8"))
    )
    Path(to).write_text(json.dumps(found), encoding="utf-8")
