"""Sharing out this machine's NVIDIA GPUs among the ranks that are started on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rrfp_jax.runtime.processes.slurm import SlurmStep

PROC = Path("/proc/driver/nvidia/gpus")

SHARED_MEMORY = 0.9
"""Part of a GPU's memory that ranks sharing it take together; JAX would give each of them 0.75."""

MEMORY, OLD_MEMORY = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The part of a GPU's memory that JAX takes: today's variable and its old name. Both at once it refuses."""


def visible_gpus(environment: Mapping[str, str], proc: Path = PROC) -> Sequence[str]:
    """The GPUs that programs see in an environment: those that CUDA_VISIBLE_DEVICES names, or all."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return [str(i) for i, _ in enumerate(proc.iterdir())] if proc.is_dir() else []


def gpu_environment(
    environment: Mapping[str, str], rank: int, count: int, proc: Path = PROC
) -> dict[str, str]:
    """What to add to a rank's environment so that it sees its own GPUs.

    With at least as many GPUs as ranks each gets its share of them, in order. With fewer, neighbours share
    one, and its memory.

    Args:
        environment: of the launcher; its CUDA_VISIBLE_DEVICES limits what is shared out, and its memory
            fraction, if it has one, stays as it is.
        rank, count: of the rank, and how many there are.
        proc: where the driver lists the GPUs.
    """
    gpus = visible_gpus(environment, proc)
    if not gpus or environment.get("JAX_PLATFORMS") == "cpu":
        return {}
    first, end = rank * len(gpus) // count, (rank + 1) * len(gpus) // count
    if len(gpus) >= count:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:end])}
    sharers = sum(other * len(gpus) // count == first for other in range(count))
    if MEMORY in environment or OLD_MEMORY in environment:
        return {"CUDA_VISIBLE_DEVICES": gpus[first]}
    return {"CUDA_VISIBLE_DEVICES": gpus[first], MEMORY: f"{SHARED_MEMORY / sharers:.3f}"}


def step_gpus(environment: Mapping[str, str], step: SlurmStep, proc: Path = PROC) -> dict[str, str]:
    """The same for a task of a SLURM step: nothing where `srun` has bound it to GPUs of its own.

    Then it sees fewer than its node has for the step; else, as with --gpus-per-node, each sees all of them.
    """
    here = environment.get("SLURM_GPUS_ON_NODE", "")
    if here.isdecimal() and int(here) != len(visible_gpus(environment, proc)):
        return {}
    return gpu_environment(environment, step.local_rank, step.tasks_here, proc)
