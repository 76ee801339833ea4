"""Takes this process's place in a run: alone, or as one of several processes that run the same program.

The launcher, SLURM or a user started them. The environment says which (`place.py`).
"""

from __future__ import annotations

import atexit
import errno
import functools
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from math import inf
from pathlib import Path
from time import monotonic

from msgspec import msgpack

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import FAILED, TrainingError, UsageError
from rrfp_jax.printing import warn
from rrfp_jax.runtime import _jax
from rrfp_jax.runtime.run.alike import learn_hosts
from rrfp_jax.runtime.run.coordinator import Coordinator
from rrfp_jax.runtime.run.exits import Shutdown, end, fail, limit_overtime
from rrfp_jax.runtime.run.handshake import NUMBER, bound, connect, listen
from rrfp_jax.runtime.run.links import Card, Signs, nodes_of, require_reachable
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.place import (
    NO_PORT,
    Place,
    directly,
    exit_seconds,
    join_seconds,
    named_place,
    own_address,
    silence_seconds,
    step_gpus,
)
from rrfp_jax.runtime.run.recorder import FlightRecorder, recorder_in
from rrfp_jax.runtime.run.roll_call import RollCall
from rrfp_jax.runtime.run.stacks import first_used
from rrfp_jax.runtime.run.status_report import StatusResponder, dump_on_signal
from rrfp_jax.runtime.run.token import NO_TOKEN, SealedStore, shared_token, take_token
from rrfp_jax.runtime.run.world import World

REMINDER_SECONDS = 30.0

GRACE_SECONDS = 5.0
"""Whatever has a limit of its own, and can say more, comes first."""

POLL_SECONDS = 0.5


class JoinWatchdog(AbstractContextManager["JoinWatchdog"]):
    """Ends this process when what it waits for does not come; as a context manager, for the waits inside."""

    def __init__(self, rank: int, give_up: Callable[[TrainingError], None]) -> None:
        self._rank, self._give_up = rank, give_up
        self._awaited: tuple[str, float, float, Callable[[], str]] = "", inf, inf, str
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrfp-joining", daemon=True)

    def waits_for(self, what: str, seconds: float, tried: Callable[[], str] = str) -> None:
        """From now on this is waited for, at most so long; `tried` says how far that has come, in words."""
        self._awaited = what, seconds, monotonic() + seconds, tried
        if self._thread.ident is None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        reminded = monotonic()
        while not self._done.wait(POLL_SECONDS):
            what, seconds, end, tried = self._awaited
            if (left := end - monotonic()) + GRACE_SECONDS < 0:
                sentence = f"{what} did not come within {seconds:g} s"
                self._give_up(TrainingError(": ".join(filter(None, [sentence, tried()]))))
            elif monotonic() - reminded >= REMINDER_SECONDS:
                reminded = monotonic()
                sentence = f"rank {self._rank} waits for {what}, {max(left, 0.0):.0f} s left"
                warn(": ".join(filter(None, [sentence, tried()])))


CONNECT_SECONDS = 60.0
"""Limit for all processes to have connected to each other, once all have been started."""

LEAVE_SECONDS = 5.0

TAKEN = "RRFP_TAKEN"
"""The place in a run that a process has taken, in the environment of the workers that it starts."""


@functools.cache
def join() -> World:
    """Take this process's place in its run, once; whoever asks again gets the same.

    Waits until all processes have been started and are connected to each other.

    Raises:
        UsageError: the environment says half of what is needed, or nonsense, or JAX was in use already.
        TrainingError: the others cannot be reached.
    """
    limit = exit_seconds(ENVIRONMENT)
    given = in_company()
    try:
        world = _joined()
    except BaseException:
        if in_company() and not given:
            _leave_soon()
        raise
    limit_overtime(world, limit)
    if world.folder is not None or world.size > 1:
        ENVIRONMENT[TAKEN] = named_place(ENVIRONMENT)
    return world


def _leave_soon() -> None:
    """Leave JAX's service, which may be out of reach: at its exit JAX would try for five minutes."""
    leaver = threading.Thread(target=_jax.leave_run, name="rrfp-leave", daemon=True)
    leaver.start()

    def limit() -> None:
        leaver.join(LEAVE_SECONDS)
        if leaver.is_alive():
            end(World(), FAILED)

    atexit.register(limit)


def is_taken() -> bool:
    """Whether this process's place in a run has been taken: by itself, or by the rank whose worker it is."""
    return ENVIRONMENT.get(TAKEN) == named_place(ENVIRONMENT)


def in_company() -> bool:
    """Whether this process has joined a run of several."""
    found = _jax.place_in_run()
    return found is not None and found[1] > 1


def _joined() -> World:
    """Like `join`, without a limit on what follows the work."""
    place = Place.of(ENVIRONMENT)
    step = None if place is None else place.step
    if step is not None:
        ENVIRONMENT.update(step_gpus(ENVIRONMENT, step))  # this task's share, if `srun` shows it those of all
    silence, limit = silence_seconds(ENVIRONMENT), join_seconds(ENVIRONMENT)
    folder = None if place is None else place.folder
    rank, size = (place.rank, place.processes) if place is not None else (0, 1)
    recorder = None if folder is None else _recorder(folder, rank)
    token = take_token(ENVIRONMENT)

    with JoinWatchdog(rank, lambda error: fail(World(rank, size, folder=folder), error)) as joining:
        coordinator = None
        if place is not None and size > 1 and _jax.place_in_run() is None:
            _require_able(place, token)
            coordinator = _meet(place, joining, limit)
        if (found := _jax.place_in_run()) is None or found[1] == 1:
            world = World(folder=folder, recorder=recorder)
            if folder is not None:  # a process without others answers its launcher
                StatusResponder(world).alone()
            return world
        rank, size = found
        joining.waits_for("the run's token", CONNECT_SECONDS)
        if step is not None and token is None:
            path = Path.home() / ".rrfp" / f"{step.name}.token"
            token = shared_token(path, _jax.key_value_store(), rank, size, CONNECT_SECONDS)
        if token is None:
            raise UsageError(f"jax.distributed was initialized, but {NO_TOKEN}")
        store = SealedStore(_jax.key_value_store(), token)
        joining.waits_for("the addresses and calls of all other ranks", CONNECT_SECONDS)
        world = World(rank, size, _connect(rank, size, token, store, silence), folder, recorder, store)
    Shutdown(world, coordinator)
    world.learn_clock()
    learn_hosts(world)
    return world


def _recorder(folder: Path, rank: int) -> FlightRecorder:
    try:
        recorder = FlightRecorder(recorder_in(folder, rank), rank, "")
        dump_on_signal(folder / f"stacks-{rank}.txt", recorder)
        return recorder
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be written: {error.strerror}; name another directory, or make room"
        ) from None


def _require_able(place: Place, token: bytes | None) -> None:
    """Refuse at once what could never meet the others."""
    if _jax.in_use():
        raise UsageError(
            f"JAX was used before this process joined the others, so it cannot join them any more: "
            f"{first_used(_jax.first_use())}; begin the program with `import rrfp_jax as rrfp` and "
            f"`rrfp.join()`, before all other imports"
        )
    if token is None and place.step is None:
        raise UsageError(NO_TOKEN)
    place.coordinator.require_known()
    try:
        with socket.socket() as probe:
            probe.bind(("", 0))
    except OSError as error:
        reason = NO_PORT if error.errno == errno.EADDRINUSE else error.strerror
        raise UsageError(f"rank {place.rank} cannot take part: {reason}") from None


def _meet(place: Place, joining: JoinWatchdog, limit: float) -> Coordinator | None:
    """Wait for all processes of the run, and serve them if this is rank 0 and there is no launcher."""
    where, coordinator = place.coordinator, None
    roll_call = RollCall(place, "rank 0" if place.folder is None else "the launcher")
    awaited = f"all {place.processes} ranks at {where}"
    joining.waits_for(awaited, limit, roll_call.said)
    try:
        if place.rank == 0 and place.folder is None:
            coordinator = Coordinator(where.serving, place.processes)
    except (OSError, RuntimeError) as error:
        raise TrainingError(f"this process cannot join its run: {error}") from None
    ENVIRONMENT.update(directly(where.host, ENVIRONMENT))
    with ExitStack() as unless_met:
        if coordinator is not None:
            unless_met.callback(coordinator.leave)  # others may still hear from it who is missing
        if not roll_call.answer(limit):
            raise TrainingError(f"{awaited} did not come within {limit:g} s: {roll_call.said()}")
        joining.waits_for(f"JAX's meeting of {awaited}", CONNECT_SECONDS, where.tried)
        try:
            _jax.join_run(str(where), place.processes, place.rank)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"{awaited} cannot be joined: {where.tried()} ({reason})") from None
        unless_met.pop_all()
    return coordinator


def _connect(rank: int, size: int, token: bytes, store: SealedStore, silence: float) -> Mailbox:
    """Connections to all other ranks, whose addresses are in the key-value store."""
    deadline = monotonic() + CONNECT_SECONDS
    listener = _listen(rank)
    host, port = listener.getsockname()[:2]
    datagrams = bound(host, socket.SOCK_DGRAM)
    node = socket.gethostname() or host
    own = Card(host, port, datagrams.getsockname()[1], secrets.token_hex(NUMBER), node)
    cards: list[Card] = []
    try:
        store.key_value_set_bytes(f"rrfp/address/{rank}", msgpack.encode(own))
        for other in range(size):
            left = int(1000 * max(deadline - monotonic(), 0.0))
            value = store.blocking_key_value_get_bytes(f"rrfp/address/{other}", left)
            cards.append(msgpack.decode(value, type=Card))
    except RuntimeError as error:
        raise TrainingError(
            f"rank {rank}: rank {len(cards) % size} has not said within {CONNECT_SECONDS:.0f} s where it "
            f"listens; see its output ({str(error).splitlines()[0]})"
        ) from None
    require_reachable([card.node for card in cards], [card.host for card in cards])
    addresses = [(card.host, card.port) for card in cards]
    sockets = connect(listener, addresses, rank, token, deadline - monotonic())
    signs = Signs(rank, datagrams, dict(enumerate(cards)), token)
    return Mailbox(rank, sockets, silence, signs, nodes_of(cards))


def _listen(rank: int) -> socket.socket:
    address = "the coordinator's host"
    try:
        address = own_address()
        listener = listen(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"rank {rank} cannot listen on {address}: {NO_PORT}") from None
        raise UsageError(
            f"rank {rank} cannot listen on {ENVIRONMENT.get('RRFP_BIND') or address}: {error.strerror}; set "
            f"RRFP_BIND to an address of this machine that the other ranks reach"
        ) from None
    _jax.exchange_at(address)
    return listener
