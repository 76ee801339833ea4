"""With how many replicas a run can go on, and what becomes of the state in the host's memory if with none."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.run.host_memory import HostMemory, outlives_launcher


def ranks_of_replicas(mesh: Mesh, processes: int) -> Mapping[int, int]:
    """By number of replicas, of how many processes, each with as many devices as one of the whole run has.

    The numbers divide the mesh's: then replicas can share a step's microbatches whenever all of them can.

    Args:
        mesh: of the whole run.
        processes: of the whole run.
    """
    share, found = mesh.devices // processes, {}
    for replicas in (number for number in range(1, mesh.dp + 1) if mesh.dp % number == 0):
        fewer = replace(mesh, dp=replicas)
        if fewer.devices % share == 0 and _fits(fewer, ranks := fewer.devices // share):
            found[replicas] = ranks
    return found


def _fits(mesh: Mesh, processes: int) -> bool:
    try:
        mesh.groups(processes)
    except UsageError:
        return False
    return True


def save_latest(
    memory: HostMemory, checkpoints: Path | None, status: int, say: Callable[[str], None]
) -> bool:
    """Copy the latest state to the run's checkpoints if it is later than all of them; whether they have it.

    It stays in memory, in a folder of its own, until it has been copied, also if the launcher is killed.

    Args:
        memory: that the ranks were lent; all of them have ended.
        checkpoints: their folder; None if the run saves none.
        status: with which the run ends.
        say: tells what is saved or lost.
    """
    steps = CheckpointFolder(memory.states).steps()
    stored = CheckpointFolder(checkpoints).steps() if checkpoints is not None else []
    if not steps:
        return False
    if steps[-1] <= max(stored, default=-1):
        return True
    latest = f"the state after {steps[-1]} steps, which only the host's memory has"
    if checkpoints is None:
        if status != DONE:
            say(f"{latest}, is lost, as the run saves none: --config.checkpoint.every_steps=N has it saved")
        return False
    say(f"saves {latest}, as {checkpoints / str(steps[-1])}")
    try:
        kept = outlives_launcher(memory)
    except OSError as error:
        say(f"it is lost: {memory.folder}: {error.strerror}")
        return False
    try:
        CheckpointFolder(checkpoints).import_checkpoint(CheckpointFolder(kept.states).final(steps[-1]))
    except OSError as error:
        say(_remedy(error, kept, steps[-1], checkpoints))
        return False
    shutil.rmtree(kept.folder, ignore_errors=True)
    return True


def _remedy(error: OSError, memory: HostMemory, step: int, checkpoints: Path) -> str:
    """What is said of a state that cannot be copied."""
    folder, left, state = (
        shlex.quote(str(p)) for p in (checkpoints, memory.folder, memory.states / str(step))
    )
    place = error.filename2 or error.filename or checkpoints
    return (
        f"it cannot be saved: {place}: {error.strerror}; it stays in memory, in {memory.folder}, as long as "
        f"this machine runs. To keep it, see to that, then: "
        f"mkdir -p {folder} && cp -r {state} {folder}/ && rm -r {left}"
    )
