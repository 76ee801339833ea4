"""The transport that tests/house/diffs adds, between two worlds in one process: the short scenarios."""

import os
import socket
import sys
import threading

import jax

from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport import protocol
from rrfp_jax.runtime.transport.choice import between_processes
from tests.support import transport_conformance as conformance

LONG = [conformance.both_ways, conformance.slow_reader, conformance.large, conformance.memory]
ONE_PROCESS = [
    conformance.still_computed,
    conformance.sender_forgets,
    conformance.witness_is_let_go,
    conformance.all_at_once,
]
"""What looks at all of a process, or sends more at once than a mailbox of this process takes."""

SCENARIOS = [one for one in conformance.BETWEEN["SocketTransport"] if one not in (*LONG, *ONE_PROCESS)]


def both(worlds, call):
    """Call it in a thread for each world; the results, or the first error."""
    found, errors = {}, []

    def run(world):
        try:
            found[world.rank] = call(world)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(world,), daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if errors:
        raise errors[0]
    assert len(found) == len(worlds)
    return found


def main():
    os.environ["RRFP_BIND"] = "127.0.0.1"
    pair = socket.socketpair()
    worlds = [World(rank, 2, Mailbox(rank, {1 - rank: end})) for rank, end in enumerate(pair)]

    def connected(world):
        devices = {world.rank: (jax.devices()[0],)}
        ends = protocol.Endpoints(world, [[0], [1]], devices, [1 - world.rank])
        return between_processes("pigeon", ends)

    made = both(worlds, connected)
    ends = {
        rank: conformance.Ends(one.transport, {rank: jax.devices()[0]}, [0, 1], worlds[rank])
        for rank, one in made.items()
    }
    for scenario in SCENARIOS:
        both(worlds, lambda world, scenario=scenario: scenario(ends[world.rank]))
    print(f"{made[0].way}: {len(SCENARIOS)} scenarios")


if __name__ == "__main__":
    sys.exit(main())
