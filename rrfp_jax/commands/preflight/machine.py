"""Checks: limits of this process, and the folder of the runs."""

from __future__ import annotations

from rrfp_jax.commands.preflight.findings import Finding, Level
from rrfp_jax.commands.preflight.surroundings import Surroundings

OWN_FILES, FILES_PER_RANK = 256, 8
"""Open files of a process: its libraries, devices and data; and sockets to every other rank, with room."""

SHM_BYTES = 64 << 20
"""Docker gives so little, and NCCL wants more for a few GPUs."""

FREE_BYTES = 1 << 30


def check_open_files(found: Surroundings) -> Finding:
    """Whether a socket to every rank, and all else, can be open at once."""
    soft, hard = found.open_files
    ranks = 1 if found.place is None else found.place.processes
    needed = OWN_FILES + FILES_PER_RANK * ranks
    if soft >= needed or soft < 0:  # negative: unlimited
        return Finding("ok", "files", f"{soft} may be open at once")
    said = f"{soft} may be open at once, and {ranks} ranks may need {needed}"
    own = hard < 0 or hard >= needed
    return Finding(
        "FAIL", "files", said, f"ulimit -n {needed}" if own else "LimitNOFILE of slurmd, or limits.conf"
    )


def check_shm(found: Surroundings) -> Finding:
    """Whether there is shared memory, which NCCL needs between GPUs of a machine."""
    if found.shm_free > SHM_BYTES:
        return Finding("ok", "shm", f"{found.shm_free >> 20} MiB free in /dev/shm")
    level: Level = "FAIL" if found.gpus > 1 else "warn"
    said = f"{found.shm_free >> 20} MiB free in /dev/shm"
    return Finding(level, "shm", said, "docker run --shm-size=1g; else rm what others left in /dev/shm")


def check_nixl(found: Surroundings) -> Finding | None:
    """Whether NIXL works, and which way UCX takes on this machine."""
    nixl = found.nixl
    if not nixl.version:
        if not found.gpus:
            return None
        said = "NIXL is not installed, so messages between processes go through hosts"
        return Finding("warn", "nixl", said, "pip install --no-deps nixl-cu12 (or nixl-cu13)")
    if nixl.error:
        fix = "--config.transport=socket; docs/transport.md says what NIXL needs"
        return Finding("warn", "nixl", f"{nixl.version} does not work here: {nixl.error}", fix)
    ways = ", ".join(nixl.ways) or "a way that it does not tell"
    if any(way.startswith("tcp") for way in nixl.ways):
        said = f"{nixl.version}; between processes of this machine UCX falls back to {ways}"
        return Finding(
            "warn", "nixl", said, "let processes copy from each other: docker --cap-add=SYS_PTRACE"
        )
    return Finding("ok", "nixl", f"{nixl.version}; between processes of this machine by {ways}")


def check_folder(found: Surroundings) -> Finding:
    """Whether runs can be written, and all ranks write to the same place."""
    folder, meeting = found.folder, found.meeting
    fix = "--config.directory=FOLDER of a run, on a file system that all nodes share"
    if folder.error:
        return Finding("FAIL", "folder", f"{folder.name}: {folder.error}", fix)
    if meeting is not None and not meeting.error and not meeting.sees_folder:
        said = f"{folder.name}: what rank 0 writes is not seen on {found.host}, nor would checkpoints be"
        return Finding("FAIL", "folder", said, fix)
    if folder.free < FREE_BYTES:
        said = f"{folder.name}: {folder.free >> 20} MiB free, which a checkpoint soon fills"
        return Finding("warn", "folder", said, fix)
    return Finding("ok", "folder", f"{folder.name}: writable, {folder.free >> 30} GiB free")
