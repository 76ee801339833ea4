"""What a run would find where it starts: collected once, so that the checks need nothing else."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from subprocess import PIPE, STDOUT

from rrfp_jax.commands.preflight import nixl_probe
from rrfp_jax.errors import UsageError
from rrfp_jax.files import read_whole
from rrfp_jax.runtime.run.alike import found_versions
from rrfp_jax.runtime.run.handshake import listen
from rrfp_jax.runtime.run.place import PROC, Place, SlurmStep, address_towards, step_gpus

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")

NIXL_PACKAGES = ("nixl-cu12", "nixl-cu13")

MOST_MODULES, LONGEST_MODULE = 5000, 1 << 24
"""That are looked at below a folder, which may be a whole disk; bytes of one."""

PROBE_SECONDS = 180.0
"""Limit for JAX to find its devices, and for a trial of NIXL."""

PROBE = "import jax; found = jax.local_devices(); print(found[0].platform, len(found))"


@dataclass(frozen=True)
class Folder:
    """Of the runs: its name, why nothing can be written there (empty if it can), free bytes."""

    name: str = "runs"
    error: str = ""
    free: int = 1 << 40


@dataclass(frozen=True)
class Nixl:
    """NIXL on this machine.

    Attributes:
        version: of what is installed; empty if nothing is.
        ways: that UCX takes to write from one process to another in host memory, such as "cma/memory".
        error: why it does not work.
    """

    version: str = ""
    ways: Sequence[str] = ()
    error: str = ""


@dataclass(frozen=True)
class Meeting:
    """What a task learned when it called the others.

    Attributes:
        hosts: the node of each rank; empty if they did not come together.
        versions: of each rank's packages, as `alike.found_versions` has them.
        code: the hash of each rank's modules.
        error: why they did not: the first thing that went wrong.
        port_taken: rank 0 could not listen on the coordinator's port, for this reason.
        ahead: seconds by which rank 0's clock is before this one's, and the error of that.
        sees_folder: whether what rank 0 writes into the folder of the runs is seen here.
        sees_home: the same of `~/.rrfp`.
    """

    hosts: tuple[str, ...] = ()
    versions: tuple[Mapping[str, str], ...] = ()
    code: tuple[str, ...] = ()
    error: str = ""
    port_taken: str = ""
    ahead: float = 0.0
    ahead_error: float = 0.0
    sees_folder: bool = True
    sees_home: bool = True


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """All that the checks look at.

    Attributes:
        environment: variables of this process.
        place: of this process in its run, as `join` would have it; None if alone, or if `place_error`.
        place_error: why `join` would refuse the variables.
        step: of SLURM, whether `place` comes from it or not.
        tp: ranks in a tensor-parallel group.
        host, address: this machine's name, and the address to listen on.
        address_error: why nothing can listen there; empty if it can.
        versions: of JAX's packages that are installed.
        gpus, gpu_files: GPUs that the driver lists, and those whose /dev/nvidia* is there.
        platform, devices: what JAX finds with these GPUs.
        probe_error: why it finds nothing.
        open_files: soft and hard limit.
        shm_free: bytes free in /dev/shm.
        nixl: which carries messages between processes if a run asks for it.
        folder: of the runs.
        meeting: with the other tasks; None if there are none.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None
    place_error: str = ""
    step: SlurmStep | None = None
    tp: int = 1
    host: str = "n1"
    address: str = "10.0.0.1"
    address_error: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    gpu_files: int = 0
    platform: str = "cpu"
    devices: int = 1
    probe_error: str = ""
    open_files: tuple[int, int] = (1 << 16, 1 << 16)
    shm_free: int = 1 << 34
    nixl: Nixl = Nixl()
    folder: Folder = Folder()
    meeting: Meeting | None = None


def found_place(environment: Mapping[str, str]) -> tuple[Place | None, SlurmStep | None, str]:
    """This process's place in its run, its SLURM step, and why the variables would be refused, if so."""
    try:
        return Place.of(environment), SlurmStep.of(environment), ""
    except UsageError as error:
        return None, None, str(error)


def code_hash(folder: Path) -> str:
    """Of this package's modules and of those below a folder, where a run would find a config's modules."""
    found = blake2b(digest_size=8)
    for root in (Path(__file__).parents[2], folder):
        count = 0
        for parent, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
            for name in sorted(name for name in files if name.endswith(".py")):
                with suppress(OSError):
                    path = Path(parent, name)
                    found.update(str(path.relative_to(root)).encode() + read_whole(path, LONGEST_MODULE))
                if (count := count + 1) == MOST_MODULES:
                    return found.hexdigest()
    return found.hexdigest()


def found_devices(environment: Mapping[str, str], step: SlurmStep | None) -> tuple[str, int, str]:
    """Platform and number of the devices that JAX finds, in a process of its own, or else why none."""
    command, own = [sys.executable, "-c", PROBE], {} if step is None else step_gpus(environment, step)
    env = {**environment, **own, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
        platform, devices = done.stdout.splitlines()[-1].split()
    except subprocess.TimeoutExpired:
        return "", 0, f"it has not found its devices in {PROBE_SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        return "", 0, (error.stderr.strip() or f"status {error.returncode}").splitlines()[-1]
    return platform, int(devices), ""


def found_nixl(environment: Mapping[str, str]) -> Nixl:
    """NIXL, tried between two processes in host memory."""
    found = found_versions(NIXL_PACKAGES)
    if not found:
        return Nixl()
    installed = " ".join(next(iter(found.items())))
    command, env = [sys.executable, "-m", nixl_probe.__name__], {**environment, "UCX_PROTO_INFO": "y"}
    try:
        done = subprocess.run(
            command, env=env, stdout=PIPE, stderr=STDOUT, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Nixl(installed, (), f"a trial has not ended in {PROBE_SECONDS:g} s")
    said = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    error = "" if done.returncode == 0 else (said or [f"status {done.returncode}"])[-1]
    return Nixl(installed, nixl_probe.ways_in(done.stdout), error)


def found_folder(name: str) -> Folder:
    """The folder of the runs; made if it is missing, as a run would."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        test = path / f".doctor-{socket.gethostname()}-{os.getpid()}"
        test.write_text("")
        test.unlink()
        return Folder(name, "", shutil.disk_usage(path).free)
    except OSError as error:
        return Folder(name, error.strerror or str(error))


def look(environment: Mapping[str, str], *, folder: str, tp: int) -> Surroundings:
    """Everything but the meeting with other tasks."""
    place, step, place_error = found_place(environment)
    host, address, address_error = "localhost" if place is None else place.coordinator.host, "", ""
    try:
        address = address_towards(host)
        listen(address).close()
    except OSError as error:
        address_error = f"{address or host}: {error.strerror or error}"
    platform, devices, probe_error = found_devices(environment, step)
    return Surroundings(
        environment=environment,
        place=place,
        place_error=place_error,
        step=step,
        tp=tp,
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        address=address,
        address_error=address_error,
        versions=found_versions(PACKAGES),
        gpus=sum(1 for _ in PROC.iterdir()) if PROC.is_dir() else 0,
        gpu_files=sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*")),
        platform=platform,
        devices=devices,
        probe_error=probe_error,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        shm_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        nixl=found_nixl(environment),
        folder=found_folder(folder),
    )
