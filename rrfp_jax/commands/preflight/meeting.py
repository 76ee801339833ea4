"""The tasks of a step meet like ranks of a run: they answer a roll call, and then connect in pairs.

Rank 0 serves the roll call. When all have come, it tells where each listens, and a token for this meeting.
All else goes by messages between the ranks.
"""

from __future__ import annotations

import json
import secrets
import threading
from contextlib import closing
from pathlib import Path
from time import monotonic, perf_counter, time

from rrfp_jax.checkpoint.shared_folder import seen_by
from rrfp_jax.commands.preflight.surroundings import Meeting, code_hash
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import expanded
from rrfp_jax.runtime.run.alike import found_versions
from rrfp_jax.runtime.run.coordinator import RollCallDoor, listening
from rrfp_jax.runtime.run.handshake import connect, listen
from rrfp_jax.runtime.run.links import require_reachable
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.place import Place
from rrfp_jax.runtime.run.roll_call import RollCall
from rrfp_jax.runtime.run.world import World

CONNECT_SECONDS = 15.0
"""For all pairs, and for each answer of a rank, once all have come."""

LINGER_SECONDS = 5.0
"""By how much longer rank 0 serves than it waits itself: others, who came later, hear who is missing."""

HOME = "~/.rrfp"
"""Where ranks of a SLURM step find the run's token."""


def meet(place: Place, host: str, address: str, folder: Path, limit: float) -> Meeting:
    """Call the other tasks.

    Args:
        place: of this task.
        host: its node's name.
        address: at which it listens.
        folder: of the runs.
        limit: for all tasks to come, in seconds.
    """
    server = None
    if place.rank == 0:
        try:
            door = RollCallDoor(listening(place.coordinator.serving, 0.0), place.processes)
        except OSError as error:
            reason = error.strerror or str(error)
            return Meeting(error=f"rank 0 could not serve: {reason}", port_taken=reason)
        server = threading.Thread(target=_serve, args=(door, limit + LINGER_SECONDS), daemon=True)
        server.start()
    try:
        found = _met(place, host, address, folder, limit)
    except (OSError, ValueError, TrainingError, UsageError) as error:
        found = Meeting(error=str(error) or type(error).__name__)
    if server is not None:
        server.join()
    return found


def _serve(door: RollCallDoor, seconds: float) -> None:
    deadline = monotonic() + seconds
    with closing(door):
        while not door.complete and monotonic() < deadline:
            door.turn()
        if door.complete:
            cards = [card for _, card in sorted(door.cards.items())]
            door.go(json.dumps([secrets.token_hex(16), cards]))


def _met(place: Place, host: str, address: str, folder: Path, limit: float) -> Meeting:
    place.coordinator.require_known()
    own = [found_versions(), code_hash(Path.cwd())]
    folders = folder, expanded("HOME", HOME)
    with listen(address) as listener:
        card = json.dumps([host, *listener.getsockname()[:2]])
        call = RollCall(place, card=card, limit="--limit")
        if not call.answer(limit):
            awaited = f"all {place.processes} ranks at {place.coordinator}"
            raise TrainingError(f"{awaited} did not come within {limit:g} s: {call.said()}")
        token, cards = json.loads(call.told)
        others = [json.loads(card) for card in cards]
        hosts, addresses = [name for name, *_ in others], [tuple(where) for _, *where in others]
        if not place.coordinator.is_loopback:  # else all are on one machine, whatever that is called
            require_reachable(hosts, [host for host, _ in addresses])
        sockets = connect(listener, addresses, place.rank, token.encode(), CONNECT_SECONDS)
    with closing(Mailbox(place.rank, sockets, nodes=hosts)) as mailbox:
        world = World(place.rank, place.processes, mailbox)
        world.learn_clock(CONNECT_SECONDS)
        epoch, (offset, precision) = time() - perf_counter(), world.clock
        told = world.gather("what each node has", [epoch, *own], CONNECT_SECONDS)
        sees, sees_home = (seen_by(world, each, CONNECT_SECONDS)[place.rank] for each in folders)
    return Meeting(
        hosts=tuple(hosts),
        versions=tuple(versions for _, versions, _ in told),
        code=tuple(code for *_, code in told),
        ahead=told[0][0] + offset - epoch,
        ahead_error=precision,
        sees_folder=sees,
        sees_home=sees_home,
    )
