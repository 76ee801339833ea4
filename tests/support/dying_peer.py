"""One end of a transfer is killed, in every phase: what the other one gets, and when.

As a program it starts a sender and a receiver for each phase, by forking before JAX has started anything, and
prints a JSON line for each: what the survivor met, how long after the death, and its exit status.
"""

import json
import os
import signal
import time
import traceback
from functools import partial

import jax
import numpy as np

from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.nixl.transport import NixlTransport
from rrfp_jax.runtime.run.handshake import connect, listen
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.protocol import Endpoints, Key
from rrfp_jax.runtime.transport.socket import SocketTransport

LIMIT_SECONDS = 8.0
ROUND = 9
KEY = Key(ROUND, 1, Task(FORWARD, 0, 3).input)
SMALL, LARGE = 2**10, 2**26  # numbers of 4 bytes
SENDER, RECEIVER = range(2)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def pattern(size):
    return np.arange(size, dtype=np.float32)


def poll(transport, mailbox):
    """Look once and sleep as a driver does."""
    arrived = transport.poll()
    if not arrived:
        seconds = transport.seconds_until_poll()
        mailbox.sleep(1.0 if seconds is None else seconds)
    return arrived


def offer(world, transport, size):
    transport.offer(KEY, [jax.device_put(pattern(size), jax.devices()[0])])


def wait_for_failure(world, transport):
    """The survivor: nothing wrong may arrive, and an error must come."""
    while True:
        for key, arrays, *_ in poll(transport, world.mailbox):
            assert key == KEY
            assert np.array_equal(arrays[0], pattern(arrays[0].size)), "garbage arrived"


def never_reads(world, transport):
    world.mailbox.sleep(1.0)  # until the first message is there
    die()


def dies_while_pulling(world, transport):
    while transport.seconds_until_poll() is None:
        assert not poll(transport, world.mailbox)
    time.sleep(0.03)
    die()


def dies_while_written_to(world, transport):
    """Somewhere between the offer and the end of the write: a place of 256 MiB takes its time, too."""
    world.mailbox.sleep(1.0)
    transport.poll()
    time.sleep(0.01)
    die()


def only_offers(world, transport):
    offer(world, transport, SMALL)
    world.mailbox.sleep(0.2)
    die()


def dies_after_offering(world, transport):
    offer(world, transport, SMALL)
    die()


def produces_and_dies(world, transport, size=SMALL, after=0.0):
    offer(world, transport, size)
    transport.produced(KEY, time.perf_counter())
    time.sleep(after)
    die()


def offers_much(world, transport):
    offer(world, transport, LARGE)
    transport.produced(KEY, time.perf_counter())
    wait_for_failure(world, transport)


def looks_later(world, transport):
    """Learns of the offer, of its producer's end and of the death at once."""
    time.sleep(0.5)
    wait_for_failure(world, transport)


PHASES = {
    "the receiver dies before pulling": (offers_much, never_reads),
    "the receiver dies while pulling": (offers_much, dies_while_pulling),
    "the sender dies after offering": (only_offers, wait_for_failure),
    "the sender dies after offering, heard of later": (dies_after_offering, looks_later),
    "the sender dies after producing": (produces_and_dies, wait_for_failure),
    "the sender dies after producing, heard of later": (produces_and_dies, looks_later),
    "the sender dies during a large transfer": (
        partial(produces_and_dies, size=LARGE, after=0.05),
        wait_for_failure,
    ),
}
"""What the sender and the receiver do. One of them kills itself."""

TRANSPORTS = {
    "SocketTransport": PHASES,
    "NixlTransport": PHASES | {"the receiver dies while pulling": (offers_much, dies_while_written_to)},
}


def made(name, world, role):
    """A transport between the two, as for a run."""
    ends = Endpoints(world, [[SENDER], [RECEIVER]], {role: jax.devices()[:1]}, [1 - role])
    return {"SocketTransport": SocketTransport, "NixlTransport": NixlTransport}[name].connect(ends).transport


def play(name, role, listeners, part, words):
    """Be the sender or the receiver; tell what happened by a pipe."""
    addresses = [listener.getsockname()[:2] for listener in listeners]
    world = World(role, 2, Mailbox(role, connect(listeners[role], addresses, role, b"token", 5.0)))
    world.run_stages(["stage 0", "stage 1"])
    transport = made(name, world, role)
    transport.begin(ROUND)
    world.gather("both to be ready", None)
    try:
        part(world, transport)
    except Exception as error:
        at, told = time.perf_counter(), "".join(traceback.format_exception(error))
        message = {"error": type(error).__name__, "message": str(error), "at": at, "traceback": told}
        os.write(words, json.dumps(message).encode())


def stage(name, parts):
    """Run a phase with a transport; what the survivor said."""
    listeners = [listen("127.0.0.1") for _ in parts]
    hear, words = os.pipe()
    children = {}
    for role, part in enumerate(parts):
        if not (child := os.fork()):
            status = 1
            try:
                play(name, role, listeners, part, words)
                status = 0
            finally:
                os._exit(status)
        children[child] = role
    os.close(words)
    for listener in listeners:
        listener.close()
    ended = wait(children)
    with open(hear, "rb") as pipe:
        said = pipe.read()
    found = json.loads(said) if said else {}
    died = next((at for status, at in ended.values() if status == -signal.SIGKILL), None)
    if found and died:
        found["seconds"] = found["at"] - died
    return found | {"ended": {role: status for role, (status, _) in ended.items()}}


def wait(children):
    """Exit status and time of each role, once all have ended; who takes too long is killed."""
    ended, deadline = {}, time.monotonic() + LIMIT_SECONDS
    while len(ended) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            ended[children[child]] = os.waitstatus_to_exitcode(status), time.perf_counter()
        elif time.monotonic() > deadline:
            deadline = float("inf")
            for child, role in children.items():
                if role not in ended:
                    os.kill(child, signal.SIGTERM)
        else:
            time.sleep(2e-3)
    return ended


def main():
    os.environ["RRFP_BIND"] = "127.0.0.1"
    for name, phase in json.loads(os.environ["TEST_CASES"]):
        told = stage(name, TRANSPORTS[name][phase])
        print(json.dumps({"transport": name, "phase": phase} | told), flush=True)


if __name__ == "__main__":
    main()
