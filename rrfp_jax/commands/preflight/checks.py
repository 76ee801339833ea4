"""What `rrfp doctor` checks: a table of functions of what was found, each with its subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from rrfp_jax.commands.preflight.surroundings import Surroundings
from rrfp_jax.runtime.run.alike import COMPILING, by_value, differing_versions, who
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY, Address, gpus_of_step, proxy_for, visible_gpus
from rrfp_jax.runtime.run.token import FILE, HOW, NAME

Level: TypeAlias = Literal["ok", "warn", "FAIL"]


class CheckResult(NamedTuple):
    """A check's answer.

    Attributes:
        level: ok, warn (it may cost something), FAIL (a run would not work).
        subject: one word, such as "gpus".
        said: what was found, and why that is wrong if it is.
        fix: what to type, or to do; empty if ok.
    """

    level: Level
    subject: str
    said: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.subject}: {self.said}"
        return f"{line}\n      fix: {self.fix}" if self.fix else line


Answer: TypeAlias = tuple[Level, str, str] | str | None
"""Level, what was found, and the fix; only what was found, if that is well; None if nothing is to check."""

OTHER_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpiexec", "PMI_RANK"),
    "WORLD_SIZE": ("torchrun", "RANK"),
}
"""The variable with the number of processes of launchers that are not ours, and the one with the rank."""

OLDEST = (0, 10, 2)
INSTALL = 'pip install ".[cuda13]", or ".[cuda12]" for drivers too old for CUDA 13'
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")

SKEW_SECONDS = 1.0
"""By which clocks of nodes may differ: logs and the times of files are still in order."""

OWN_FILES, FILES_PER_RANK = 256, 8
"""Open files of a process: its libraries, devices and data; and sockets to every other rank, with room."""

SHM_BYTES = 64 << 20
"""Docker gives so little, and NCCL wants more for a few GPUs."""

FREE_BYTES = 1 << 30


def check_place(found: Surroundings) -> Answer:
    """Whether a run started here is alone or one of several, and whether that is what was meant."""
    environment, place, step = found.environment, found.place, found.step
    if found.place_error:
        return "FAIL", found.place_error, "start ranks with srun, or unset ${!SLURM_@} ${!RRFP_@}"
    if place is not None and place.folder is not None and step is not None:
        said = f"each of srun's {step.processes} tasks runs a launcher of its own, of {place.processes} ranks"
        return "FAIL", said, "srun --ntasks=1 rrfp launch ..., or srun python train.py"
    if place is not None and place.processes > 1:
        by = "srun" if step is not None else "RRFP_RANK"
        rank = f"rank {place.rank} of {place.processes} on {found.host}"
        return f"{rank}, by {by}; all meet at {place.coordinator}"
    job, tasks = environment.get("SLURM_JOB_ID"), environment.get("SLURM_NTASKS", "1")
    if place is None and job and tasks != "1":
        said = f"this is in job {job} of {tasks} tasks but no task of srun: a run here is alone"
        return "warn", said, "srun python train.py, or on this node only: rrfp launch -n 4 train.py"
    return f"alone on {found.host}: all stages in one process"


def check_launcher(found: Surroundings) -> Answer:
    """Whether a launcher that a run knows nothing of has started several processes."""
    for size, (launcher, rank) in OTHER_LAUNCHERS.items():
        if found.place is None and found.environment.get(size, "1") != "1":
            said = f"{launcher} started {found.environment[size]} processes, each of them a run alone"
            place = f"RRFP_COORDINATOR=host0:9876 RRFP_PROCESSES=${size} RRFP_RANK=${rank}"
            return "FAIL", said, f"export {place} RRFP_TOKEN_FILE=run.token"
    return None


def check_versions(found: Surroundings) -> Answer:
    """Whether JAX is new enough, and its parts belong together."""
    versions = found.versions
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    if _release(versions.get("jax", "0")) < OLDEST:
        return "FAIL", f"{said}: too old", f"pip install -U 'jax>={'.'.join(map(str, OLDEST))}'"
    plugins = [name for name in PLUGINS if name in versions]
    if len(plugins) > 1:
        return "FAIL", f"{said}: two plugins", f"pip uninstall {plugins[1]}"
    odd = [name for name in plugins if _release(versions[name]) != _release(versions.get("jaxlib", "0"))]
    return ("FAIL", f"{said}: {odd[0]} is not jaxlib's version", INSTALL) if odd else said


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def check_nodes(found: Surroundings) -> Answer:
    """Whether all ranks have the same packages, and the same modules below the present folder."""
    meeting = found.meeting
    if meeting is None or not meeting.versions or (found.place is not None and found.place.rank):
        return None  # rank 0 tells it for all
    other = differing_versions(meeting.versions, meeting.hosts)
    said, refused = "; ".join(other.values()), not {*COMPILING}.isdisjoint(other)
    if said:
        return "FAIL" if refused else "warn", said, "install the same versions on every node"
    ranks = by_value(meeting.code)
    if len(ranks) > 1:
        groups = " and ".join(who(own, meeting.hosts) for own in ranks.values())
        fix = "git status; git rev-parse HEAD on each node: a run whose layers differ is refused"
        return "warn", f"modules of rrfp_jax or below the present folder differ between {groups}", fix
    return "all ranks have the same packages and modules"


def check_gpus(found: Surroundings) -> Answer:
    """Whether JAX sees the GPUs that are here, and if not, what hides them."""
    given = found.environment.get("SLURM_STEP_GPUS") or found.environment.get("SLURM_JOB_GPUS")
    if found.platform not in {"", "cpu"}:
        return f"JAX sees {found.devices} of {found.gpus}"
    if found.gpus:
        level, why, fix = _what_hides_them(found)
        return level, f"JAX sees none of {found.gpus}: {why}", fix
    if given:
        said = f"SLURM has given GPU {given}, but no driver lists any"
        return "FAIL", said, "nvidia-smi on this node; in a container: --nv or --gpus all"
    if found.probe_error:
        fix = "python -c 'import jax; jax.devices()'; JAX_PLATFORMS names a platform that is not here?"
        return "FAIL", f"JAX finds no device: {found.probe_error}", fix
    return "none here; JAX uses the CPU"


def _what_hides_them(found: Surroundings) -> tuple[Level, str, str]:
    """The first cause that applies: level, why, fix."""
    platforms = found.environment.get("JAX_PLATFORMS", "")
    visible = found.environment.get("CUDA_VISIBLE_DEVICES", "all")
    in_job = "SLURM_JOB_ID" in found.environment
    if platforms.startswith("cpu"):
        return "warn", f"JAX_PLATFORMS={platforms}", "unset JAX_PLATFORMS"
    if not visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) or visible.startswith(("-", "No")):
        fix = "srun --gpus-per-task=1 ..." if in_job else "unset CUDA_VISIBLE_DEVICES"
        return "FAIL", f"CUDA_VISIBLE_DEVICES={visible!r} hides them", fix
    if not found.gpu_files:
        fix = "srun --gpus-per-task=1 ...; in a container: --nv or --gpus all"
        return "FAIL", "there is no /dev/nvidia* for this process", fix
    if not {*PLUGINS} & {*found.versions}:
        return "FAIL", "its CUDA plugin is not installed", INSTALL
    fix = f"unset LD_LIBRARY_PATH; nvidia-smi for the driver's CUDA version, and then {INSTALL}"
    return "FAIL", found.probe_error or "the plugin finds no device", fix


def check_memory(found: Surroundings) -> Answer:
    """Whether the ranks of this node have a GPU and its memory each."""
    environment, gpus = found.environment, gpus_of_step(found.environment)
    ranks = found.step.tasks_here if found.step else 1
    if MEMORY in environment and OLD_MEMORY in environment:
        return "FAIL", f"{MEMORY} and {OLD_MEMORY} are set, which JAX refuses", f"unset {OLD_MEMORY}"
    if not gpus or ranks <= gpus or found.platform == "cpu":
        return None
    sharers = -(-ranks // gpus)
    said = f"{ranks} ranks share {gpus} GPUs"
    asked = environment.get(MEMORY) or environment.get(OLD_MEMORY)
    if asked and _number(asked) * sharers > 1:
        fix = f"unset {MEMORY} {OLD_MEMORY}, or export {MEMORY}={0.9 / sharers:.2f}"
        return "FAIL", f"{said}, and each takes {asked} of its GPU's memory", fix
    return "warn", said, f"as many GPUs as tasks: --gpus-per-task=1, or {ranks} per node"


def check_binding(found: Surroundings) -> Answer:
    """Whether the ranks of a group see each other's GPUs, for collectives from one to the other."""
    visible, here = len(visible_gpus(found.environment)), gpus_of_step(found.environment)
    if found.tp == 1 or found.step is None or not 0 < visible < here:
        return None
    said = (
        f"srun shows this task {visible} of {here} GPUs; where cgroups hide the others, collectives of "
        f"a group go through the host's memory"
    )
    fix = f"--gpus-per-node={here} instead of --gpus-per-task: the ranks then share them out themselves"
    return "warn", said, fix


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0


def check_address(found: Surroundings) -> Answer:
    """Whether this process can listen where others reach it."""
    fix = "export RRFP_BIND=an address of this node that the others reach (hostname -I lists them)"
    if found.address_error:
        return "FAIL", f"cannot listen on {found.address_error}", fix
    connected = found.meeting is not None and not found.meeting.error
    if _nodes(found) > 1 and Address(found.address, 0).is_loopback and not connected:
        said = f"{found.address} is a loopback, which no other node reaches: see {found.host} in /etc/hosts"
        return "FAIL", said, fix
    return f"listens on {found.address}"


def check_port(found: Surroundings) -> Answer:
    """Whether rank 0 can serve the others at the coordinator's port."""
    if found.place is None or found.meeting is None or found.place.rank:
        return None
    where = found.place.coordinator
    if not found.meeting.port_taken:
        return f"{where.port} is free for the coordinator"
    other = Address(where.host, 1024 + (where.port + 4321) % 60000)
    by_hand = f"export RRFP_COORDINATOR={other} on all ranks"
    fix = by_hand if found.step is None else f"export JAX_COORDINATOR_PORT={other.port}"
    return "FAIL", f"cannot serve at {where.port}: {found.meeting.port_taken}", fix


def check_exposure(found: Surroundings) -> Answer:
    """Whether machines that no rank is on could reach our ports."""
    place, known = found.place, found.step is not None or bool(found.meeting and found.meeting.hosts)
    if place is None or place.processes == 1 or found.address_error or not known:
        return None
    where = place.coordinator
    if _nodes(found) > 1:
        said = f"control messages and transfers listen on {found.address}"
        serving = where.serving.replace("[::]", "every address")
        return said if place.rank else f"{said}, the coordination service on {serving}"
    if not where.is_loopback:
        said = f"all ranks are on {found.host}, but other machines reach them, and the coordinator at {where}"
        return "warn", said, f"export RRFP_COORDINATOR={Address('127.0.0.1', where.port)} on all ranks"
    if not Address(found.address, 0).is_loopback:
        said = f"all ranks are on {found.host}, but other machines reach this one at {found.address}"
        return "warn", said, "unset RRFP_BIND"
    return "no other machine reaches the ranks and their coordinator"


def check_proxy(found: Surroundings) -> Answer:
    """Whether a proxy stands between a rank and the coordinator."""
    host = "" if found.place is None else found.place.coordinator.host
    proxy = proxy_for(host, found.environment) if host else None
    if proxy is None:
        return "none between the ranks"
    said = (
        f"{proxy}={found.environment[proxy]} would be asked for {host}. Our runs call it directly; a program "
        f"that calls jax.distributed.initialize itself is aborted after five minutes"
    )
    return "warn", said, f"export no_proxy=$no_proxy,{host}"


def check_peers(found: Surroundings) -> Answer:
    """Whether the ranks have met and reach each other."""
    if found.meeting is None:
        return None
    if found.meeting.error:
        fix = "firewall between nodes? RRFP_BIND for the right network; all tasks started? srun rrfp doctor"
        return "FAIL", found.meeting.error, fix
    return f"connected to all of {len(found.meeting.hosts)} ranks"


def check_clock(found: Surroundings) -> Answer:
    """Whether this node's clock agrees with rank 0's."""
    meeting = found.meeting
    if meeting is None or meeting.error:
        return None
    if abs(meeting.ahead) - meeting.ahead_error <= SKEW_SECONDS:
        return f"within {abs(meeting.ahead) + meeting.ahead_error:.3f} s of rank 0's"
    said = f"rank 0's is {meeting.ahead:+.1f} s from this one: logs and times of files are out of order"
    return "warn", said, "chronyc tracking, or timedatectl: is this node's time synchronised?"


def check_groups(found: Surroundings) -> Answer:
    """Whether every tensor-parallel group, `tp` ranks in a row, is on one node."""
    hosts, tp = found.meeting.hosts if found.meeting else (), found.tp
    if tp == 1 or not hosts:
        return None
    if len(hosts) % tp:
        said = f"{len(hosts)} ranks are not whole groups of --tp={tp}"
        return "FAIL", said, f"make --ntasks a multiple of {tp}"
    for first in range(0, len(hosts), tp):
        if len(own := {*hosts[first : first + tp]}) > 1:
            said = (
                f"ranks {first} to {first + tp - 1}, a group, are on {', '.join(sorted(own))}: "
                f"its collectives would cross the network"
            )
            return "FAIL", said, f"--distribution=block --ntasks-per-node=N, N a multiple of {tp}"
    return f"each group of {tp} ranks is on one node"


def _nodes(found: Surroundings) -> int:
    if found.meeting is not None and found.meeting.hosts:
        return len({*found.meeting.hosts})
    return 1 if found.step is None else len(found.step.tasks_per_node)


def check_files(found: Surroundings) -> Answer:
    """Whether a socket to every rank, and all else, can be open at once."""
    soft, hard = found.open_files
    ranks = 1 if found.place is None else found.place.processes
    needed = OWN_FILES + FILES_PER_RANK * ranks
    if soft >= needed or soft < 0:  # negative: unlimited
        return f"{soft} may be open at once"
    fix = f"ulimit -n {needed}" if hard < 0 or hard >= needed else "LimitNOFILE of slurmd, or limits.conf"
    return "FAIL", f"{soft} may be open at once, and {ranks} ranks may need {needed}", fix


def check_shm(found: Surroundings) -> Answer:
    """Whether there is shared memory, which NCCL needs between GPUs of a machine."""
    said = f"{found.shm_free >> 20} MiB free in /dev/shm"
    if found.shm_free > SHM_BYTES:
        return said
    fix = "docker run --shm-size=1g; else rm what others left in /dev/shm"
    return "FAIL" if found.gpus > 1 else "warn", said, fix


def check_nixl(found: Surroundings) -> Answer:
    """Whether NIXL works, and which way UCX takes on this machine."""
    nixl = found.nixl
    if not nixl.version:
        said = "NIXL is not installed, so messages between processes go through hosts"
        return ("warn", said, "pip install --no-deps nixl-cu12 (or nixl-cu13)") if found.gpus else None
    if nixl.error:
        fix = "--config.transport=socket; docs/transport.md says what NIXL needs"
        return "warn", f"{nixl.version} does not work here: {nixl.error}", fix
    ways = ", ".join(nixl.ways) or "a way that it does not tell"
    if any(way.startswith("tcp") for way in nixl.ways):
        said = f"{nixl.version}; between processes of this machine UCX falls back to {ways}"
        return "warn", said, "let processes copy from each other: docker --cap-add=SYS_PTRACE"
    return f"{nixl.version}; between processes of this machine by {ways}"


def check_folder(found: Surroundings) -> Answer:
    """Whether runs can be written, and all ranks write to the same place."""
    folder, meeting = found.folder, found.meeting
    fix = "--config.directory=FOLDER of a run, on a file system that all nodes share"
    if folder.error:
        return "FAIL", f"{folder.name}: {folder.error}", fix
    if meeting is not None and not meeting.error and not meeting.sees_folder:
        said = f"{folder.name}: what rank 0 writes is not seen on {found.host}, nor would checkpoints be"
        return "FAIL", said, fix
    if folder.free < FREE_BYTES:
        return "warn", f"{folder.name}: {folder.free >> 20} MiB free, which a checkpoint soon fills", fix
    return f"{folder.name}: writable, {folder.free >> 30} GiB free"


def check_token(found: Surroundings) -> Answer:
    """Whether the ranks of a SLURM step can be given the run's token."""
    meeting = found.meeting
    given = found.environment.get(NAME) or found.environment.get(FILE)
    if found.step is None or given or meeting is None or meeting.error:
        return None
    if meeting.sees_home:
        return "~/.rrfp, in which rank 0 writes it, is shared"
    return "FAIL", f"~/.rrfp, in which rank 0 writes it, is not seen on {found.host}", f"before srun: {HOW}"


CHECKS: Mapping[str, Callable[[Surroundings], Answer]] = {
    "place": check_place,
    "launcher": check_launcher,
    "versions": check_versions,
    "nodes": check_nodes,
    "gpus": check_gpus,
    "memory": check_memory,
    "binding": check_binding,
    "address": check_address,
    "port": check_port,
    "exposure": check_exposure,
    "proxy": check_proxy,
    "peers": check_peers,
    "clock": check_clock,
    "groups": check_groups,
    "files": check_files,
    "shm": check_shm,
    "nixl": check_nixl,
    "folder": check_folder,
    "token": check_token,
}
"""By subject, in the order in which they are told."""


def examine(found: Surroundings) -> list[CheckResult]:
    """What all checks that apply say."""
    results = []
    for subject, check in CHECKS.items():
        answer = check(found)
        if isinstance(answer, str):
            results.append(CheckResult("ok", subject, answer))
        elif answer is not None:
            level, said, fix = answer
            results.append(CheckResult(level, subject, said, fix))
    return results
