"""A process's place in its run, as the environment says it: the launcher's, SLURM's, or the user's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.processes.address import Address
from rrfp_jax.runtime.processes.slurm import SlurmStep
from rrfp_jax.runtime.processes.token import SharedToken

NAMES = COORDINATOR, PROCESSES, RANK = "RRFP_COORDINATOR", "RRFP_PROCESSES", "RRFP_RANK"

EXAMPLE = f"{COORDINATOR}=host0:9876 {PROCESSES}=4 {RANK}=0"

SILENCE_SECONDS = 25.0
"""A process from which nothing has come for so long is given up, so that a frozen run ends within 30 s.
RRFP_SILENCE_SECONDS changes it."""

SHORTEST_SILENCE_SECONDS = 2.0
"""Four heartbeats."""

JOIN_SECONDS = 300.0
"""So long a process waits until all others have come. RRFP_JOIN_SECONDS changes it."""

EXIT_SECONDS = 300.0
"""So long users' threads and exit handlers may outlast the work. RRFP_EXIT_SECONDS changes it."""

SHORTEST_EXIT_SECONDS = 5.0
"""Loggers take so long to send what they have."""


@dataclass(frozen=True)
class Place:
    """What the environment says about this process's place in a run.

    Attributes:
        coordinator: where the coordination service is.
        processes, rank: in the run, and which this is.
        folder: in which the launcher collects what ranks leave.
        token: where the run's token is if the environment does not tell it.
    """

    coordinator: Address
    processes: int
    rank: int
    folder: Path | None
    token: SharedToken | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place | None:
        """Read RRFP_COORDINATOR, RRFP_PROCESSES and RRFP_RANK, which are set together or not at all.

        Raises:
            UsageError: some are missing, or say what cannot be.
        """
        given = [name for name in NAMES if environment.get(name)]
        if not given:
            return None
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
        return cls(coordinator, int(processes), int(rank), _folder(environment))

    @classmethod
    def in_step(cls, step: SlurmStep) -> Place:
        """That of a task of a SLURM step."""
        return cls(step.coordinator, step.processes, step.rank, None, SharedToken(step.name))


def _folder(environment: Mapping[str, str]) -> Path | None:
    text = environment.get("RRFP_FOLDER")
    if not text:
        return None
    if not Path(text).is_dir():
        raise UsageError(
            f"RRFP_FOLDER={text}: there is no such folder; the launcher sets it for its ranks, those started "
            f"by hand need none: unset RRFP_FOLDER"
        )
    return Path(text)


def named_place(environment: Mapping[str, str]) -> str:
    """What the environment says of a place, in a text that no other place of any run has."""
    names = (*NAMES, "RRFP_FOLDER", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
    return " ".join(environment.get(name, "-") for name in names)


def silence_seconds(environment: Mapping[str, str]) -> float:
    """RRFP_SILENCE_SECONDS, or the default: after how long a silence a process is given up.

    Raises:
        UsageError: it is no number, or too short.
    """
    what = f"the seconds after which a silent process is given up, at least {SHORTEST_SILENCE_SECONDS:g} "
    what += "(heartbeats come every 0.5 s)"
    return _seconds(environment, "RRFP_SILENCE_SECONDS", SILENCE_SECONDS, SHORTEST_SILENCE_SECONDS, what)


def join_seconds(environment: Mapping[str, str]) -> float:
    """RRFP_JOIN_SECONDS, or the default: how long to wait until all processes have come.

    Raises:
        UsageError: it is no number, or shorter than a second.
    """
    what = "the seconds within which all ranks must have been started, at least 1"
    return _seconds(environment, "RRFP_JOIN_SECONDS", JOIN_SECONDS, 1.0, what)


def exit_seconds(environment: Mapping[str, str]) -> float:
    """RRFP_EXIT_SECONDS, or the default: how long a process whose work is done waits for users' threads.

    Raises:
        UsageError: it is no number, or too short.
    """
    what = "the seconds that threads and exit handlers of your own have once the work is done, at least "
    what += f"{SHORTEST_EXIT_SECONDS:g}"
    return _seconds(environment, "RRFP_EXIT_SECONDS", EXIT_SECONDS, SHORTEST_EXIT_SECONDS, what)


def _seconds(environment: Mapping[str, str], name: str, usual: float, least: float, what: str) -> float:
    text = environment.get(name) or str(usual)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= least:  # nor nan
        raise UsageError(f"{name}={text}: give {what}, such as {usual:g}")
    return seconds
