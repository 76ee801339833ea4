"""Whole training steps of a tiny model under PyTorch's schedules. Runs where PyTorch is.

    python -m benchmarks.rivals.torch_null_step QUESTION ANSWER

The question: names of schedules; the answer, of each: {"step": median seconds of a step, "cpu": CPU seconds
of a step, of all processes}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from benchmarks.rivals import tiny
from benchmarks.rivals.torch_pipelines import RIVALS, on_ranks, step
from rrfp_jax.runtime.engine.device import precise_timers


def timed(name: str, rank: int) -> tuple[float, float]:
    """One rank's median step under a schedule, and its CPU per step (s)."""
    rival = RIVALS[name]
    placement = rival.placement(tiny.RANKS)
    own = [placement.virtual_stage(rank, chunk) for chunk in range(placement.chunks)]
    virtual_stages = [_virtual_stage(v, placement.last + 1) for v in own]
    schedule = rival.schedule(virtual_stages, tiny.MICROBATCHES, torch.nn.MSELoss(reduction="sum"))
    parameters = [p for stage in virtual_stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=tiny.LEARNING_RATE)
    inputs = torch.randn(tiny.MICROBATCHES * tiny.ROWS, tiny.WIDTH)
    dist.barrier()
    began, cpu = [], 0.0
    for number in range(tiny.WARM_UP + tiny.STEPS):
        if number == tiny.WARM_UP:
            cpu = process_time()
        began.append(perf_counter())
        step(schedule, virtual_stages, inputs, inputs)
        optimizer.step()
        optimizer.zero_grad()
    began.append(perf_counter())
    cpu = (process_time() - cpu) / tiny.STEPS
    took = [after - before for before, after in pairwise(began)]
    return median(took[tiny.WARM_UP :]), cpu


def _virtual_stage(v: int, count: int) -> Any:
    """As many of the model's layers as every virtual stage has."""
    layers = [
        module
        for _ in range(tiny.LAYERS // count)
        for module in (torch.nn.Linear(tiny.WIDTH, tiny.WIDTH), torch.nn.Tanh())
    ]
    return PipelineStage(torch.nn.Sequential(*layers), v, count, torch.device("cpu"))


def all_timed(names: Sequence[str], rank: int) -> list[tuple[float, float]]:
    """One rank's figures under each schedule."""
    with precise_timers():
        return [timed(name, rank) for name in names]


def answer(names: Sequence[str]) -> dict[str, Any]:
    """What the schedules take; see above."""
    columns = zip(*on_ranks(tiny.RANKS, partial(all_timed, names)), strict=True)
    return {
        name: {"step": own[0][0], "cpu": sum(cpu for _, cpu in own)}
        for name, own in zip(names, columns, strict=True)
    }


if __name__ == "__main__":
    asked, to = map(Path, sys.argv[1:])
    to.write_text(json.dumps(answer(json.loads(asked.read_text(encoding="utf-8")))), encoding="utf-8")
