"""Checks: who started this process, as which of how many, and where the others are."""

from __future__ import annotations

from collections.abc import Iterator

from rrfp_jax.commands.preflight.findings import Finding
from rrfp_jax.commands.preflight.surroundings import Surroundings

OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpiexec", "PMI_RANK"),
    "WORLD_SIZE": ("torchrun", "RANK"),
}
"""The variable with the number of processes of launchers that are not ours, and the one with the rank."""


def check_place(found: Surroundings) -> Finding:
    """Whether a run started here is alone or one of several, and whether that is what was meant."""
    environment, place, step = found.environment, found.place, found.step
    if found.place_error:
        fix = "start ranks with srun, or unset ${!SLURM_@} ${!RRFP_@}"
        return Finding("FAIL", "place", found.place_error, fix)
    if place is not None and place.folder is not None and step is not None:
        said = f"each of srun's {step.processes} tasks runs a launcher of its own, of {place.processes} ranks"
        return Finding("FAIL", "place", said, "srun --ntasks=1 rrfp-launch ..., or srun python train.py")
    if place is not None and place.processes > 1:
        by = "srun" if step is not None else "RRFP_RANK"
        said = f"rank {place.rank} of {place.processes} on {found.host}, by {by}; all meet at "
        return Finding("ok", "place", f"{said}{place.coordinator}")
    job, tasks = environment.get("SLURM_JOB_ID"), environment.get("SLURM_NTASKS", "1")
    if place is None and job and tasks != "1":
        said = f"this is in job {job} of {tasks} tasks but no task of srun: a run here is alone"
        fix = "srun python train.py, or on this node only: rrfp-launch -n 4 train.py"
        return Finding("warn", "place", said, fix)
    return Finding("ok", "place", f"alone on {found.host}: all stages in one process")


def check_other_launchers(found: Surroundings) -> Finding | None:
    """Whether a launcher that a run knows nothing of has started several processes."""
    for size, (launcher, rank) in OTHER_LAUNCHERS.items():
        several = found.environment.get(size, "1") != "1"
        if found.place is None and several:
            said = f"{launcher} started {found.environment[size]} processes, each of them a run alone"
            place = f"RRFP_COORDINATOR=host0:9876 RRFP_PROCESSES=${size} RRFP_RANK=${rank}"
            fix = f"export {place} RRFP_TOKEN_FILE=run.token"
            return Finding("FAIL", "launcher", said, fix)
    return None


def check_groups(found: Surroundings) -> Finding | None:
    """Whether every tensor-parallel group, `tp` ranks in a row, is on one node."""
    hosts = found.meeting.hosts if found.meeting else ()
    if found.tp == 1 or not hosts:
        return None
    if len(hosts) % found.tp:
        return Finding(
            "FAIL",
            "groups",
            f"{len(hosts)} ranks are not whole groups of --tp={found.tp}",
            f"make --ntasks a multiple of {found.tp}",
        )
    split = next(_split_groups(hosts, found.tp), None)
    if split is None:
        return Finding("ok", "groups", f"each group of {found.tp} ranks is on one node")
    return Finding(
        "FAIL",
        "groups",
        f"ranks {split} to {split + found.tp - 1}, a group, are on "
        f"{', '.join(sorted(set(hosts[split : split + found.tp])))}: its collectives would cross the network",
        f"--distribution=block --ntasks-per-node=N, N a multiple of {found.tp}",
    )


def _split_groups(hosts: tuple[str, ...], tp: int) -> Iterator[int]:
    return (first for first in range(0, len(hosts), tp) if len(set(hosts[first : first + tp])) > 1)
