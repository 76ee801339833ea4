"""A process's place in its run, as the environment says it: the launcher's, SLURM's, or the user's own.

Only `srun` sets the variables of a step. Shells of `salloc`, batch scripts and ssh sessions have some of the
other variables, and all that they start inherits them. JAX would take the number of tasks of the *job* as the
number of processes. Here a process is one of several only if its own step has several tasks.

Proxies: gRPC would ask them to call the coordinator, too, which they usually cannot.

On jax 0.10.2 a proxy in the way ends in an abort after five minutes. Which variables count is as in gRPC's
"Default HTTP Proxy Mapper" guide, and was tried: names in capitals have no effect, nor has `no_proxy=*`.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import UsageError

ADDRESS_EXAMPLE = "host0:9876, or [fd00::7]:9876"

_WRITTEN = re.compile(r"(?:\[(?P<inside>[^\[\]]*)\]|(?P<name>[^:\[\]]*)):(?P<port>[0-9]{1,20})")
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")

LONGEST_NAME = 253
"""Characters, by RFC 1035."""

HIGHEST_PORT = 65535

NO_PORT = "no port is free: end what holds them (`ss -s` counts), or widen net.ipv4.ip_local_port_range"
"""What it means that the system finds none for who asks for any."""


PROBE_SECONDS = 2.0
"""For a call that only tells whether anybody answers at an address."""


class Address(NamedTuple):
    """A host and a port of it."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, name: str) -> Address:
        """Read "host:port", the value of `name`; UsageError if no such address can exist."""
        try:
            return cls._parsed(text)
        except ValueError as error:
            raise UsageError(f"{name}={text!r}: {error}; give host:port, such as {ADDRESS_EXAMPLE}") from None

    @classmethod
    def _parsed(cls, text: str) -> Address:
        if (written := _WRITTEN.fullmatch(text)) is None:
            several = text.count(":") > 1 and "[" not in text
            raise ValueError("an IPv6 address must be in brackets" if several else "that is no host and port")
        port, inside, name = int(written["port"]), written["inside"], written["name"]
        if not 0 < port <= HIGHEST_PORT:
            raise ValueError(f"there is no port {port}, they are 1 to {HIGHEST_PORT}")
        if inside is not None:
            IPv6Address(inside)  # raises ValueError, saying why
        elif re.fullmatch(r"[0-9.]+", name):
            IPv4Address(name)
        elif not name:
            raise ValueError("the host is missing")
        elif not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
            raise ValueError("that is no name of a host")
        found = cls(name if inside is None else inside, port)
        if found._ip is not None and found._ip.is_unspecified:
            raise ValueError("that means every address of a machine: give the one at which rank 0 is reached")
        return found

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can reach it."""
        return self.host == "localhost" or (self._ip is not None and self._ip.is_loopback)

    @property
    def serving(self) -> str:
        """Where to listen on its machine, as gRPC writes that: no wider than need be.

        That is everywhere behind a translation of addresses, and where a machine takes its own name for
        loopback.
        """
        if self.is_loopback:
            return str(self)
        with suppress(OSError):
            for *_, found in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
                host = str(found[0])
                if not ip_address(host.partition("%")[0]).is_loopback and _is_here(host):
                    return str(Address(host, self.port))
        return f"[::]:{self.port}"

    def require_known(self) -> None:
        """Look its host up, and the way there; UsageError if either is known not to exist."""
        try:
            _towards(self.host, self.port)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise UsageError(
                    f"the coordinator {self}: its host has no address here ({error.strerror}); is the name "
                    f"right, and known on this machine? Else give rank 0's IP address"
                ) from None
        except OSError as error:
            up = "bring loopback up: ip link set lo up" if self.is_loopback else "is the address right?"
            raise UsageError(
                f"the coordinator {self}: no network of this machine leads there ({error.strerror}); {up}"
            ) from None

    def tried(self, seconds: float = PROBE_SECONDS) -> str:
        """What comes of calling it now, in words."""
        try:
            socket.create_connection(self, timeout=seconds).close()
        except OSError as error:
            reason = f"nobody answers there ({error.strerror or error})"
            return NO_PORT if error.errno == errno.EADDRNOTAVAIL else reason
        return "somebody answers there, but not all have come, or it stands still"

    @property
    def _ip(self) -> IPv4Address | IPv6Address | None:
        with suppress(ValueError):
            return ip_address(self.host)
        return None


def _is_here(host: str) -> bool:
    """Whether this machine has an IP address."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False


def _towards(host: str, port: int) -> str:
    """This machine's address from which a host is reached."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: the kernel only chooses a route
        return str(probe.getsockname()[0])


def own_address() -> str:
    """The address that this process of a run listens on."""
    from rrfp_jax.runtime import _jax  # here: the launcher reads this file without JAX

    return address_towards(_jax.coordinator_host())


def address_towards(coordinator: str) -> str:
    """RRFP_BIND, or the address from which the coordinator's host is reached; OSError if there is none."""
    if chosen := ENVIRONMENT.get("RRFP_BIND", "").strip("[]"):
        found = str(socket.getaddrinfo(chosen, None, type=socket.SOCK_STREAM)[0][4][0])
        if ip_address(found).is_unspecified:
            raise OSError(errno.EINVAL, "that is every address: name the one to be reached at")
        return found
    return _towards(coordinator, 9)


FIRST_PORT, PORTS = 61440, 4096
"""Coordinators listen on one of these, so that jobs on one node rarely meet (as JAX has it)."""

ANOTHER_STEP = 997
"""How far the ports of two steps of a job are apart."""

RANGE = r"[0-9]{1,9}(?:-[0-9]{1,9})?"
NODE = rf"(?:[A-Za-z0-9_.-]|\[{RANGE}(?:,{RANGE})*\])+"
"""In a list of nodes: a name, or several by numbers in brackets."""

MOST_NODES = 10**6


class SlurmStep(NamedTuple):
    """One task of a step with several."""

    name: str
    coordinator: Address
    processes: int
    rank: int
    local_rank: int
    node: int
    tasks_per_node: tuple[int, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SlurmStep | None:
        """Read the variables of a step; None for a process that is no task, or the only one.

        JAX_COORDINATOR_PORT, if it is set, is the coordinator's port, as in JAX. UsageError says that
        variables of a step with several tasks are missing, or say what cannot be.
        """
        if not environment.get("SLURM_STEP_NODELIST") or not environment.get("SLURM_PROCID"):
            return None
        if (processes := _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")) == 1:
            return None
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID", default=0)
        usual = FIRST_PORT + (job + ANOTHER_STEP * step) % PORTS
        port = _number(environment, "JAX_COORDINATOR_PORT", default=usual)
        says = "the first of SLURM_STEP_NODELIST, and JAX_COORDINATOR_PORT"
        one_node = environment.get("SLURM_STEP_NUM_NODES") == "1"  # then nobody else need reach the ports
        host = "127.0.0.1" if one_node else first_host(environment["SLURM_STEP_NODELIST"])
        if (rank := _number(environment, "SLURM_PROCID")) >= processes:
            raise UsageError(f"SLURM_PROCID={rank} in a step of {processes} tasks; {REMEDY}")
        return cls(
            name=f"{job}-{step}-{_number(environment, 'SLURM_RESTART_COUNT', default=0)}",
            coordinator=Address.parse(f"{host}:{port}", says),
            processes=processes,
            rank=rank,
            local_rank=_number(environment, "SLURM_LOCALID"),
            node=_number(environment, "SLURM_NODEID", default=0),
            tasks_per_node=tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or str(processes)),
        )

    @property
    def tasks_here(self) -> int:
        return self.tasks_per_node[self.node] if self.node < len(self.tasks_per_node) else 1


def first_host(nodes: str) -> str:
    """The first of a SLURM list of nodes, such as "node007" of "node[007-009,012],other"."""
    if not re.fullmatch(f"{NODE}(?:,{NODE})*", nodes):
        raise UsageError(f"SLURM_STEP_NODELIST={nodes!r} is no list of nodes; {REMEDY}")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", re.findall(NODE, nodes)[0])


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Tasks per node in SLURM's way to write them: "2(x3),1" is (2, 2, 2, 1); UsageError for another way."""
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in text.split(",")]
    if not all(parts) or sum(int(part[2] or 1) for part in parts if part) > MOST_NODES:
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text} is no number of tasks per node; {REMEDY}")
    return tuple(int(part[1]) for part in parts if part for _ in range(int(part[2] or 1)))


REMEDY = "start ranks with srun, or alone without SLURM's variables: unset ${!SLURM_@}"


def _number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The number in the first of these variables that is set."""
    name = next((name for name in names if environment.get(name)), names[0])
    text = environment.get(name) or ("" if default is None else str(default))
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(f"SLURM_PROCID is set, but {name} is {text or 'missing'}; {REMEDY}")
    return int(text)


PROC = Path("/proc/driver/nvidia/gpus")

SHARED_MEMORY = 0.9
"""Part of a GPU's memory that ranks sharing it take together; JAX would give each of them 0.75."""

MEMORY, OLD_MEMORY = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The part of a GPU's memory that JAX takes: today's variable and its old name. Both at once it refuses."""


def visible_gpus(environment: Mapping[str, str]) -> Sequence[str]:
    """The GPUs that programs see in an environment: those that CUDA_VISIBLE_DEVICES names, or all."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return [str(i) for i, _ in enumerate(PROC.iterdir())] if PROC.is_dir() else []


def gpu_names(devices: Sequence[Any]) -> list[str]:
    """What the machine calls GPUs of this process, which JAX numbers by those that the process sees."""
    names = visible_gpus(ENVIRONMENT)
    places = [device.local_hardware_id or 0 for device in devices]
    return [names[place] if place < len(names) else str(place) for place in places]


def gpu_environment(environment: Mapping[str, str], rank: int, count: int) -> dict[str, str]:
    """What to add to a rank's environment so that it sees its own GPUs.

    With at least as many GPUs as ranks each gets its share of them, in order. With fewer, neighbours share
    one, and its memory.
    """
    gpus = visible_gpus(environment)
    if not gpus or environment.get("JAX_PLATFORMS") == "cpu":
        return {}
    first, end = rank * len(gpus) // count, (rank + 1) * len(gpus) // count
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : max(end, first + 1)])}
    if len(gpus) >= count or MEMORY in environment or OLD_MEMORY in environment:
        return own
    sharers = sum(other * len(gpus) // count == first for other in range(count))
    return {**own, MEMORY: f"{SHARED_MEMORY / sharers:.3f}"}


def step_gpus(environment: Mapping[str, str], step: SlurmStep) -> dict[str, str]:
    """The variables that bind a task of a SLURM step to GPUs; none where `srun` has bound it already.

    A bound task sees fewer than its node has for the step; without, as with --gpus-per-node, each sees all.
    """
    is_bound = gpus_of_step(environment) != len(visible_gpus(environment))
    return {} if is_bound else gpu_environment(environment, step.local_rank, step.tasks_here)


def gpus_of_step(environment: Mapping[str, str]) -> int:
    """How many GPUs this node has for the SLURM step; all that are seen where SLURM does not say."""
    here = environment.get("SLURM_GPUS_ON_NODE", "")
    return int(here) if here.isdecimal() else len(visible_gpus(environment))


PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""Names of the exceptions from a proxy; only the first that is set counts."""


def proxy_for(host: str, environment: Mapping[str, str]) -> str | None:
    """The variable whose proxy gRPC asks to reach a host; None if it calls it directly."""
    proxy = next((name for name in PROXIES if environment.get(name)), None)
    entries = _exceptions(environment).split(",")
    return None if any(_covers(entry.strip(), host) for entry in entries) else proxy


def directly(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment so that gRPC calls a host directly."""
    if proxy_for(host, environment) is None:
        return {}
    return {EXCEPTIONS[0]: ",".join(filter(None, [_exceptions(environment), host]))}


def _exceptions(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in EXCEPTIONS if environment.get(name)), "")


def _covers(entry: str, host: str) -> bool:
    """Whether an exception is for this host: its name's end, or a network with its address."""
    try:
        return ip_address(host) in ip_network(entry, strict=False)
    except ValueError:
        return bool(entry) and host.endswith(entry)


NAMES = COORDINATOR, PROCESSES, RANK = "RRFP_COORDINATOR", "RRFP_PROCESSES", "RRFP_RANK"

EXAMPLE = f"{COORDINATOR}=host0:9876 {PROCESSES}=4 {RANK}=0"


class Place(NamedTuple):
    """What the environment says about this process's place in a run, perhaps in a step of SLURM."""

    coordinator: Address
    processes: int
    rank: int
    folder: Path | None
    step: SlurmStep | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place | None:
        """Read RRFP_COORDINATOR, RRFP_PROCESSES and RRFP_RANK, set together or not at all; else SLURM's."""
        if not (given := [name for name in NAMES if environment.get(name)]):
            step = SlurmStep.of(environment)
            return None if step is None else cls(step.coordinator, step.processes, step.rank, None, step)
        if len(given) < len(NAMES):
            missing = " and ".join(name for name in NAMES if name not in given)
            raise UsageError(f"{given[0]} is set but not {missing}: start every rank with {EXAMPLE}")
        coordinator = Address.parse(environment[COORDINATOR], COORDINATOR)
        processes, rank = (environment[name] for name in (PROCESSES, RANK))
        numbers = all(re.fullmatch(r"[0-9]{1,9}", text) for text in (processes, rank))
        if not numbers or not int(rank) < int(processes):
            raise UsageError(
                f"{PROCESSES}={processes} {RANK}={rank}: give the number of processes, and a rank from 0 to "
                f"one less, such as {EXAMPLE}"
            )
        if (folder := environment.get("RRFP_FOLDER")) and not Path(folder).is_dir():
            raise UsageError(
                f"RRFP_FOLDER={folder}: there is no such folder; the launcher sets it for its ranks, those "
                f"started by hand need none: unset RRFP_FOLDER"
            )
        return cls(coordinator, int(processes), int(rank), Path(folder) if folder else None)


def named_place(environment: Mapping[str, str]) -> str:
    """What the environment says of a place, in a text that no other place of any run has."""
    names = (*NAMES, "RRFP_FOLDER", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
    return " ".join(environment.get(name, "-") for name in names)


SILENCE_SECONDS = 25.0
"""A process from which nothing has come for so long is given up, so that a frozen run ends within 30 s."""


class SecondsVariable(NamedTuple):
    """A variable of the environment that says some seconds."""

    name: str
    usual: float
    least: float
    what: str
    most: float = inf

    def __call__(self, environment: Mapping[str, str]) -> float:
        """The seconds that it says, or the usual ones; UsageError if it is none, or out of bounds."""
        text = environment.get(self.name) or str(self.usual)
        with suppress(ValueError):
            if self.least <= float(text) <= self.most:  # nor nan
                return float(text)
        raise UsageError(f"{self.name}={text}: give the seconds {self.what}, such as {self.usual:g}")


silence_seconds = SecondsVariable(
    *("RRFP_SILENCE_SECONDS", SILENCE_SECONDS, 2.0),
    "after which a silent process is given up, at least 2 (heartbeats come every 0.5 s)",
)
join_seconds = SecondsVariable(
    *("RRFP_JOIN_SECONDS", 300.0, 1.0), "within which all ranks must have been started, at least 1"
)
exit_seconds = SecondsVariable(
    *("RRFP_EXIT_SECONDS", 300.0, 5.0),  # what loggers take at least to send what they have
    "that threads and exit handlers of your own have once the work is done, at least 5",
)
