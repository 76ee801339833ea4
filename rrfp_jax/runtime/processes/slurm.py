"""What SLURM's variables say about a process: whether `srun` started it as one of several, and as which.

Only `srun` sets the variables of a step. Shells of `salloc`, batch scripts and ssh sessions have some of the
other variables, and all that they start inherits them. JAX would take the number of tasks of the *job* as the
number of processes. Here a process is one of several only if its own step has several tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.processes.address import Address

FIRST_PORT, PORTS = 61440, 4096
"""Coordinators listen on one of these, so that jobs on one node rarely meet (as JAX has it)."""

ANOTHER_STEP = 997

RANGE = r"[0-9]{1,9}(?:-[0-9]{1,9})?"
NODE = rf"(?:[A-Za-z0-9_.-]|\[{RANGE}(?:,{RANGE})*\])+"
"""In a list of nodes: a name, or several by numbers in brackets."""

MOST_NODES = 10**6


@dataclass(frozen=True)
class SlurmStep:
    """One task of a step with several.

    Attributes:
        name: of the step and how often its job was started again; no other one has it.
        coordinator: on the step's first node, where task 0 is; equal for all tasks. On loopback if
            there is no other node.
        processes, rank: tasks in the step, and which one this is.
        local_rank, node: which one of its node, and which node of the step.
        tasks_per_node: for each node of the step.
    """

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

        JAX_COORDINATOR_PORT, if it is set, is the coordinator's port, as in JAX.

        Raises:
            UsageError: some variables of a step with several tasks are missing, or say what cannot be.
        """
        if not environment.get("SLURM_STEP_NODELIST") or not environment.get("SLURM_PROCID"):
            return None
        processes = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        if processes == 1:
            return None
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID", default=0)
        usual = FIRST_PORT + (job + ANOTHER_STEP * step) % PORTS
        port = _number(environment, "JAX_COORDINATOR_PORT", default=usual)
        says = "the first of SLURM_STEP_NODELIST, and JAX_COORDINATOR_PORT"
        one_node = environment.get("SLURM_STEP_NUM_NODES") == "1"  # then nobody else need reach the ports
        host = "127.0.0.1" if one_node else first_host(environment["SLURM_STEP_NODELIST"])
        rank = _number(environment, "SLURM_PROCID")
        if rank >= processes:
            raise UsageError(f"SLURM_PROCID={rank} in a step of {processes} tasks; {REMEDY}")
        restart = _number(environment, "SLURM_RESTART_COUNT", default=0)
        return cls(
            name=f"{job}-{step}-{restart}",
            coordinator=Address.parse(f"{host}:{port}", says),
            processes=processes,
            rank=rank,
            local_rank=_number(environment, "SLURM_LOCALID"),
            node=_number(environment, "SLURM_NODEID", default=0),
            tasks_per_node=tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or str(processes)),
        )

    @property
    def tasks_here(self) -> int:
        """How many tasks this node has."""
        return self.tasks_per_node[self.node] if self.node < len(self.tasks_per_node) else 1


def first_host(nodes: str) -> str:
    """The first of a SLURM list of nodes, such as "node007" of "node[007-009,012],other".

    Raises:
        UsageError: it is no such list.
    """
    if not re.fullmatch(f"{NODE}(?:,{NODE})*", nodes):
        raise UsageError(f"SLURM_STEP_NODELIST={nodes!r} is no list of nodes; {REMEDY}")
    first = re.match(NODE, nodes)
    assert first is not None
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first.group())


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Of SLURM's way to write it: "2(x3),1" is (2, 2, 2, 1).

    Raises:
        UsageError: it is written otherwise.
    """
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in text.split(",")]
    if not all(parts) or sum(int(part[2] or 1) for part in parts if part) > MOST_NODES:
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text} is no number of tasks per node; {REMEDY}")
    return tuple(int(part[1]) for part in parts if part for _ in range(int(part[2] or 1)))


REMEDY = "start ranks with srun, or alone without SLURM's variables: unset ${!SLURM_@}"


def _number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """Of the first of these variables that is set."""
    name = next((name for name in names if environment.get(name)), names[0])
    text = environment.get(name) or ("" if default is None else str(default))
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(f"SLURM_PROCID is set, but {name} is {text or 'missing'}; {REMEDY}")
    return int(text)
