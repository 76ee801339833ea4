"""Takes this process's place in a run: alone, or as one of several processes that run the same program.

The launcher, SLURM or a user started them. The environment says which.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime import _jax
from rrfp_jax.runtime.lifecycle.farewell import Farewell
from rrfp_jax.runtime.processes.coordinator import Coordinator
from rrfp_jax.runtime.processes.flight_recorder import FlightRecorder
from rrfp_jax.runtime.processes.gpus import step_gpus
from rrfp_jax.runtime.processes.handshake import connect, listen
from rrfp_jax.runtime.processes.heartbeat import Beat
from rrfp_jax.runtime.processes.mailbox import Mailbox
from rrfp_jax.runtime.processes.proxies import directly
from rrfp_jax.runtime.processes.sealed_store import SealedStore
from rrfp_jax.runtime.processes.slurm import SlurmStep
from rrfp_jax.runtime.processes.token import FILE, HOW, SharedToken, take_token
from rrfp_jax.runtime.processes.waits import LONGEST_SLEEP_SECONDS
from rrfp_jax.runtime.processes.world import World

SILENCE_SECONDS = 25.0
"""A process from which nothing has come for so long is given up, so that a frozen run ends within 30 s.
RRFP_SILENCE_SECONDS changes it."""

SHORTEST_SILENCE_SECONDS = 2.0
"""Four heartbeats."""

REMINDER_SECONDS = 30.0
"""After so long a wait for the other processes to be started it is said; JAX gives up after five minutes."""

CLOCK_SECONDS = 10.0
"""Limit for rank 0 to tell its time."""

CLOCK_ROUNDS = 10
"""Round trips to rank 0 at the start, to know its clock."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Hosts of a coordinator that nobody outside this machine need reach."""

CONNECT_SECONDS = 60.0
"""Limit for all processes to have connected to each other, once all have been started."""


@dataclass(frozen=True)
class Place:
    """What the environment says about this process's place in a run.

    Attributes:
        coordinator: host:port of the coordination service.
        processes, rank: in the run, and which this is.
        folder: in which the launcher collects what ranks leave.
        token: where the run's token is if the environment does not tell it.
    """

    coordinator: str
    processes: int
    rank: int
    folder: Path | None
    token: SharedToken | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place | None:
        """Read RRFP_COORDINATOR, RRFP_PROCESSES and RRFP_RANK, which are set together or not at all.

        Raises:
            UsageError: some are missing, or no numbers.
        """
        names = ("RRFP_COORDINATOR", "RRFP_PROCESSES", "RRFP_RANK")
        given = [name for name in names if environment.get(name)]
        if not given:
            return None
        example = "RRFP_COORDINATOR=host0:9876 RRFP_PROCESSES=4 RRFP_RANK=0"
        if len(given) < len(names):
            missing = " and ".join(name for name in names if name not in given)
            raise UsageError(f"{given[0]} is set but not {missing}: start every rank with {example}")
        coordinator, processes, rank = (environment[name] for name in names)
        if not processes.isdecimal() or not rank.isdecimal() or not int(rank) < int(processes):
            raise UsageError(
                f"RRFP_PROCESSES={processes} RRFP_RANK={rank}: give the number of processes, and a rank "
                f"from 0 to one less, such as {example}"
            )
        if not coordinator.rpartition(":")[2].isdecimal() or ":" not in coordinator:
            raise UsageError(f"RRFP_COORDINATOR={coordinator}: give host:port, such as {example}")
        folder = environment.get("RRFP_FOLDER")
        return cls(coordinator, int(processes), int(rank), Path(folder) if folder else None)


def silence_seconds(environment: Mapping[str, str]) -> float:
    """RRFP_SILENCE_SECONDS, or the default: after how long a silence a process is given up.

    Raises:
        UsageError: it is no number, or too short.
    """
    text = environment.get("RRFP_SILENCE_SECONDS") or str(SILENCE_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds >= SHORTEST_SILENCE_SECONDS:  # nor nan
        raise UsageError(
            f"RRFP_SILENCE_SECONDS={text}: give the seconds after which a silent process is given up, at "
            f"least {SHORTEST_SILENCE_SECONDS:g} (heartbeats come every 0.5 s), such as {SILENCE_SECONDS:g}"
        )
    return seconds


@functools.cache
def join() -> World:
    """Take this process's place in its run, once; whoever asks again gets the same.

    Waits until all processes have been started and are connected to each other.

    Raises:
        UsageError: the environment says half of what is needed, or nonsense, or JAX was in use already.
        TrainingError: the others cannot be reached.
    """
    place, silence = Place.of(os.environ) or _place_in_step(), silence_seconds(os.environ)
    folder = None if place is None else place.folder
    recorder = (
        None
        if place is None or folder is None
        else FlightRecorder(folder / f"flight-{place.rank}", place.rank, "")
    )
    token = take_token(os.environ)
    coordinator = None
    if place is not None and place.processes > 1 and _jax.place_in_run() is None:
        if _jax.in_use():
            raise UsageError(
                "JAX was in use before this process joined the others, so it cannot join them any more: make "
                "the rrfp.Trainer before the first JAX computation"
            )
        if token is None and place.token is None:
            raise UsageError(f"no token says who is of this run: on every rank set {FILE} to the same: {HOW}")
        coordinator = _meet(place)
    found = _jax.place_in_run()
    if found is None or found[1] == 1:
        return World(folder=folder, recorder=recorder)
    rank, size = found
    shared = place.token if place is not None and token is None else None
    token = token or _shared_token(shared, rank)
    store = SealedStore(_jax.key_value_store(), token)
    world = World(rank, size, _connect(rank, size, token, store), folder, recorder, silence, store)
    if shared is not None and rank == 0:
        shared.remove()  # all ranks have proved to have it
    Farewell(world, coordinator)
    _learn_clock(world)
    return world


def _shared_token(shared: SharedToken | None, rank: int) -> bytes:
    """The token of a SLURM step, which its first task hands out."""
    if shared is None:
        raise UsageError(
            f"jax.distributed was initialized, but no token says who is of this run: on every rank set "
            f"{FILE} to the same: {HOW}"
        )
    return shared.write() if rank == 0 else shared.read(CONNECT_SECONDS)


def _learn_clock(world: World) -> None:
    """Learn rank 0's clock from a few quick round trips; all processes together.

    Raises:
        TrainingError: rank 0 does not answer.
    """
    assert world.mailbox is not None and world.heartbeat is not None
    if world.rank > 0:
        with world.waits_for("the time from rank 0", CLOCK_SECONDS) as wait:
            for wanted in range(1, CLOCK_ROUNDS + 1):
                world.mailbox.post(0, Beat(perf_counter()))
                while world.heartbeat.clock.samples < wanted:
                    world.mailbox.departures.require([0])
                    wait.check()
                    world.mailbox.sleep(wait.shortened(LONGEST_SLEEP_SECONDS))
                    world.mailbox.pump()
    world.gather("the clocks", None)  # so that rank 0 is there to answer


def _place_in_step() -> Place | None:
    """What SLURM says; this task then sees its share of the GPUs if `srun` shows it those of all tasks."""
    step = SlurmStep.of(os.environ)
    if step is None:
        return None
    os.environ.update(step_gpus(os.environ, step))
    return Place(step.coordinator, step.processes, step.rank, folder=None, token=SharedToken(step.name))


def _meet(place: Place) -> Coordinator | None:
    """Wait for all processes of the run, and serve them if this is rank 0 and there is no launcher."""
    try:
        serves = place.rank == 0 and place.folder is None
        host, _, port = place.coordinator.rpartition(":")
        everywhere = host if host in LOOPBACK else "[::]"
        coordinator = Coordinator(f"{everywhere}:{port}", place.processes) if serves else None
    except RuntimeError as error:
        raise TrainingError(f"this process cannot join its run: {error}") from None
    where = place.coordinator
    said = f"waiting for all {place.processes} ranks at {where}: are all started, and is that address right?"
    reminder = threading.Timer(REMINDER_SECONDS, print, [said], {"file": sys.stderr, "flush": True})
    reminder.daemon = True
    reminder.start()
    os.environ.update(directly(where.rpartition(":")[0].strip("[]"), os.environ))
    try:
        _jax.join_run(where, place.processes, place.rank)
    except RuntimeError as error:
        raise TrainingError(f"this process cannot join the run at {where}: {error}") from None
    finally:
        reminder.cancel()
    return coordinator


def in_company() -> bool:
    """Whether this process has joined a run of several."""
    found = _jax.place_in_run()
    return found is not None and found[1] > 1


def _connect(rank: int, size: int, token: bytes, store: SealedStore) -> Mailbox:
    """Connections to all other ranks, whose addresses are in the key-value store."""
    address = own_address()
    try:
        listener = listen(address)
    except OSError as error:
        raise UsageError(
            f"rank {rank} cannot listen on {address}: {error.strerror}; set RRFP_BIND to an address of "
            f"this machine that the other ranks reach"
        ) from None
    host, port = listener.getsockname()[:2]
    store.key_value_set_bytes(f"rrfp/address/{rank}", f"{host} {port}".encode())
    limit = int(1000 * CONNECT_SECONDS)
    addresses = []
    try:
        for other in range(size):
            value = store.blocking_key_value_get_bytes(f"rrfp/address/{other}", limit)
            host, port = value.decode().split()
            addresses.append((host, int(port)))
    except RuntimeError as error:
        raise TrainingError(
            f"rank {rank}: rank {len(addresses) % size} has not said within {CONNECT_SECONDS:.0f} s where it "
            f"listens; see its output ({str(error).splitlines()[0]})"
        ) from None
    return Mailbox(rank, connect(listener, addresses, rank, token, CONNECT_SECONDS))


def own_address() -> str:
    """The address that this process of a run listens on."""
    return address_towards(_jax.coordinator_host())


def address_towards(coordinator: str) -> str:
    """The address to listen on: RRFP_BIND, or the one from which the coordinator's host is reached.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    if chosen := os.environ.get("RRFP_BIND"):
        return chosen
    family, _, _, _, address = socket.getaddrinfo(coordinator, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: the kernel only chooses a route
        return str(probe.getsockname()[0])
