"""PyTorch's pipeline schedules by name, and processes that run them together. Runs where PyTorch is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from rrfp_jax.core.tasks import Placement, Shape

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
        """Where its virtual stages run."""
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


def on_ranks(count: int, work: Callable[[int], T]) -> list[T]:
    """What `work(rank)` gives in so many processes that can send messages to one another.

    They are forked, so that PyTorch is imported once.
    """
    torch.set_num_threads(1)  # as cores are few, and tasks tiny
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(count, get_context("fork")) as pool,
    ):
        return list(pool.map(partial(_joined, work, count, Path(folder) / "store"), range(count)))


def _joined(work: Callable[[int], T], count: int, store: Path, rank: int) -> T:
    """`work(rank)` as a member of a group; nobody leaves before all are done."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=LONGEST_WAIT
    )
    try:
        found = work(rank)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
