"""Every transport passes the same scenarios, inside one process and between several."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.coordinator import reserved_port
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.waits import SHORTEST_PAUSE
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.protocol import UNOBSERVED, Arrival, Endpoints, Key, LocalTransport
from rrfp_jax.runtime.transport.socket import SocketTransport
from tests.support import dying_peer, toy
from tests.support import transport_conformance as conformance
from tests.support.selected import selected
from tests.support.transport_conformance import Ends, numbers


class OrderError(AssertionError):
    """The ends of a link posted in different orders; the real thing swaps data or hangs."""


class Link:
    """One direction between two devices: transfers go one after another, in the order in which both post."""

    def __init__(self):
        self.announced = deque()
        self._sends, self._receives = deque(), deque()
        self._moving = None

    def post_send(self, key, arrays, at):
        self._sends.append((key, arrays, at))
        self.announced.append(key)

    def post_receive(self, key, device):
        self._receives.append((key, device))

    def advance(self):
        """The transfer that has ended since, if one has; the next one starts."""
        if self._moving is None and self._sends and self._receives:
            key, arrays, at = self._sends.popleft()
            wanted, device = self._receives.popleft()
            if key != wanted:
                raise OrderError(f"{wanted} is received where {key} is sent")
            self._moving = Arrival(key, jax.device_put(arrays, device), at)
        if self._moving is None or not all(array.is_ready() for array in self._moving.arrays):
            return None
        arrival, self._moving = self._moving, None
        return arrival

    @property
    def busy(self):
        return bool(self.announced or self._moving or self._sends)


class OrderedTransport:
    """Sends when the data exists, so that nothing unready is in the way of what is behind it."""

    def __init__(self, devices):
        self._devices, self._offered, self._waiting = devices, set(), {}
        self._links = {}
        self.order = []

    def reserve(self, messages):
        return {}

    def begin(self, round, observer=UNOBSERVED):
        self._observer = observer
        self._offered.clear()

    def offer(self, key, arrays):
        if key in self._offered:
            raise ValueError(f"{key} has been offered before")
        self._offered.add(key)
        self._waiting[key] = arrays

    def coming(self, key):
        """Nothing is foreseen."""

    def produced(self, key, at):
        if key in self._waiting:  # else the round has been broken off
            self._link(key).post_send(key, self._waiting.pop(key), at)

    def poll(self):
        arrived = []
        for link in self._links.values():
            if link.announced:
                key = link.announced.popleft()
                self._receive(link, key)
            if (arrival := link.advance()) is not None:
                self.order.append(arrival.key)
                self._observer.delivered(arrival.key)
                arrived.append(arrival)
        return arrived

    def seconds_until_poll(self):
        return SHORTEST_PAUSE if any(link.busy for link in self._links.values()) else None

    def finish(self, *, broken=False):
        self._observer = UNOBSERVED
        if broken:
            self._waiting.clear()
            self._links.clear()

    def close(self):
        pass

    def _receive(self, link, key):
        link.post_receive(key, *self._devices[key.stage])
        self._observer.coming(key)

    def _link(self, key):
        """By destination and direction: each stage hears from one neighbour in either."""
        return self._links.setdefault((key.stage, key.input.direction), Link())


ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 120.0

HERE = {
    "LocalTransport": (LocalTransport, [0, 1, 2]),
    "LocalTransport-one-device": (LocalTransport, [0, 0]),
    "LocalTransport-one-device-waits": (partial(LocalTransport, waits=True), [0, 0]),
    "OrderedTransport": (OrderedTransport, [0, 1, 2]),
}
"""What is tested in this process: how it is made, and the device of each stage."""


@pytest.mark.parametrize("scenario", [*conformance.ANYWHERE, conformance.reset], ids=lambda s: s.__name__)
@pytest.mark.parametrize("name", HERE)
def test_in_one_process(name, scenario):
    make, devices = HERE[name]
    stages = {stage: jax.devices()[index] for stage, index in enumerate(devices)}
    scenario(Ends(make(devices_of(stages)), stages, [0] * len(stages)))


@contextmanager
def started(commands, folder):
    """Processes with a log each; at the end none is left, not even after an error."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    running = []
    try:
        for number, (module, own) in enumerate(commands):
            with open(folder / f"{number}.out", "wb") as out, open(folder / f"{number}.log", "wb") as log:
                command = [sys.executable, "-m", module]
                start = subprocess.Popen
                running.append(
                    start(command, cwd=ROOT, env=env | own, stdout=out, stderr=log, process_group=0)
                )
        yield running
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(commands, folder):
    """What each process printed, as JSON lines; the logs if one failed or took too long."""
    deadline = time.monotonic() + LIMIT_SECONDS
    with started(commands, folder) as processes:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        statuses = [process.poll() for process in processes]
    logs = {path.name: path.read_text()[-3000:] for path in sorted(folder.glob("*.log"))}
    said = [(folder / f"{n}.out").read_text().splitlines() for n in range(len(commands))]
    return statuses, [[json.loads(line) for line in lines] for lines in said], logs


@pytest.fixture(scope="module")
def between(request, tmp_path_factory):
    """Scenarios between two processes, which are started once; errors by transport and scenario."""
    with reserved_port() as port:
        place = {"RRFP_COORDINATOR": f"127.0.0.1:{port}", "RRFP_PROCESSES": "2", "RRFP_BIND": "127.0.0.1"}
        place["RRFP_TOKEN"] = "0123456789abcdef" * 4
        place["TEST_CASES"] = json.dumps(selected(request, "scenario_between"))
        ranks = [("tests.support.transport_process", place | {"RRFP_RANK": str(rank)}) for rank in range(2)]
        statuses, said, logs = run(ranks, tmp_path_factory.mktemp("between"))
    found = [{(line["transport"], line["scenario"]): line["error"] for line in lines} for lines in said]
    return statuses, found, logs


@pytest.mark.costly(reason="one launch of two processes for all of its cases")
@pytest.mark.parametrize(
    "scenario_between",
    [
        pytest.param(
            (name, scenario.__name__),
            id=f"{name}-{scenario.__name__}",
            marks=[pytest.mark.slow(reason="7 s: 10,000 transfers")] * (scenario is conformance.memory),
        )
        for name, scenarios in conformance.BETWEEN.items()
        for scenario in scenarios
    ],
)
def test_between_processes(between, scenario_between):
    _, found, logs = between
    for rank, results in enumerate(found):
        assert scenario_between in results, f"rank {rank} did not get so far: {logs}"
        assert results[scenario_between] is None, results[scenario_between]


def test_processes_end_well(between):
    statuses, _, logs = between
    assert statuses == [0, 0], logs


@pytest.fixture(scope="module")
def deaths(request, tmp_path_factory):
    cases = {"TEST_CASES": json.dumps(selected(request, "death"))}
    statuses, (lines,), logs = run([("tests.support.dying_peer", cases)], tmp_path_factory.mktemp("deaths"))
    assert statuses == [0], logs
    return {(line["transport"], line["phase"]): line for line in lines}, logs


@pytest.mark.parametrize(
    "death",
    [(name, phase) for name, phases in dying_peer.TRANSPORTS.items() for phase in phases],
    ids="-".join,
)
def test_a_dying_peer(deaths, death):
    found, logs = deaths
    seen, (_, phase) = found[death], death
    victim = dying_peer.SENDER if phase.startswith("the sender") else dying_peer.RECEIVER
    assert seen["ended"] == {str(victim): -signal.SIGKILL, str(1 - victim): 0}, (seen, logs)
    assert seen["error"] in ("PeerLost", "TrainingError"), seen["traceback"]
    assert f"rank {victim} (stage {victim})" in seen["message"], seen["traceback"]
    assert seen["seconds"] < 5.0


@pytest.fixture
def two_worlds(monkeypatch):
    """Two processes of a run, both in this one."""
    monkeypatch.setenv("RRFP_BIND", "127.0.0.1")
    pair = socket.socketpair()
    worlds = [World(rank, 2, Mailbox(rank, {1 - rank: end})) for rank, end in enumerate(pair)]
    yield worlds
    for world in worlds:
        world.mailbox.close()


def socket_transport(world):
    """One process's end of two."""
    devices = {world.rank: jax.devices()[world.rank : world.rank + 1]}
    return SocketTransport(Endpoints(world, [[0], [1]], devices, [1 - world.rank]))


def test_a_process_that_is_ready_first_may_send_at_once(two_worlds):
    """The other one has heard its address and is still making its connections."""
    slow, fast = two_worlds
    key = Key(7, 0, Task(FORWARD, 0, 0).input)

    def be_fast():
        transport = socket_transport(fast)
        transport.begin(7)
        transport.offer(key, [jax.device_put(np.arange(3), jax.devices()[1])])
        transport.produced(key, 0.0)

    other = threading.Thread(target=be_fast)
    gather = slow.gather

    def gather_slowly(*arguments):
        values = gather(*arguments)
        other.join()
        slow.mailbox.pump()
        return values

    slow.gather = gather_slowly
    other.start()
    transport = socket_transport(slow)
    transport.begin(7)
    ends = Ends(transport, {0: jax.devices()[0]}, [0, 1], slow)
    ends.round = 7
    ends.until(lambda: key in ends.arrived)
    assert ends.arrived[key].arrays[0].tolist() == [0, 1, 2]


def test_what_is_offered_cannot_be_guessed(two_worlds):
    """Whoever knows an offer's number and reaches the transfer server may pull its arrays."""
    offers = []
    for world in two_worlds:
        world.mailbox.on = lambda kind, handler, channel: None
        world.mailbox.post = lambda rank, offer, channel: offers.append(offer)
        world.gather = lambda what, value, limit: [value, value]
    transport = socket_transport(two_worlds[0])
    transport.begin(1)
    for n in range(20):
        transport.offer(Key(1, 1, Task(FORWARD, 0, n).input), [jax.numpy.ones(3)])
    numbers = sorted(offer.uuid for offer in offers)
    assert len(set(numbers)) == 20 and min(b - a for a, b in itertools.pairwise(numbers)) > 2**32


def test_one_that_is_closed_is_gone(two_worlds):
    """Its transfer server, too, and with that an open port."""
    world = two_worlds[0]
    world.gather = lambda what, value, limit: [value, value]
    transport = socket_transport(world)
    host, port = transport._server.address().rsplit(":", 1)
    gone = weakref.ref(transport)
    transport.close()
    transport.close()
    del transport
    assert gone() is None
    limit = time.monotonic() + 20  # the server's own thread closes it
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < limit:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:0: .*RRFP_BIND"),
        ("fe80::1%lo", "listens on :: instead of fe80::1%lo"),
    ],
)
def test_it_listens_where_it_is_told_or_not_at_all(two_worlds, monkeypatch, host, said):
    """JAX's server would take what it cannot read for every address."""
    monkeypatch.setattr("rrfp_jax.runtime.transport.socket.own_address", lambda: host)
    with pytest.raises(TrainingError, match=said):
        socket_transport(two_worlds[0])


def devices_of(stages):
    return {stage: (device,) for stage, device in stages.items()}


class TestOrderedLink:
    """The driver's offers, ends and polls are enough for links on which both ends must keep one order."""

    def key(self, n):
        return Key(1, 1, Task(FORWARD, 0, n).input)

    def test_another_order_is_detected(self):
        link = Link()
        for n in (0, 1):
            link.post_send(self.key(n), [jax.numpy.ones(3)], 0.0)
        link.post_receive(self.key(1), jax.devices()[1])
        with pytest.raises(OrderError, match=r"input of F1 .* is received where input of F0 .* is sent"):
            link.advance()

    def test_data_comes_in_the_order_of_production(self):
        devices = dict(enumerate(jax.devices()[:2]))
        ends = Ends(OrderedTransport(devices_of(devices)), devices, [0, 0])
        ends.begin()
        for n in range(3):
            ends.offer(n, numbers(n))
        for n in (2, 0, 1):
            ends.produced(n)
        ends.receive(range(3))
        assert [key.input.microbatch for key in ends.arrived] == [2, 0, 1]

    @pytest.mark.slow(reason="2 s: a Trainer of four stages")
    def test_training_gives_the_same_gradients_to_the_bit(self):
        trainer = toy.trainer(4, data=lambda step: toy.microbatches(8), max_in_flight=8)
        trainer.start()
        driver, devices = trainer._engine.driver, trainer._engine.driver.devices
        gradients, transport = [], OrderedTransport(devices)
        for driver.local in (LocalTransport(devices), transport):
            trainer._stepper.run("train", trainer._data, 0)
            stages = trainer._engine.stages.values()
            gradients.append(jax.device_get([stage.gradients for stage in stages]))
            trainer._engine.reset_gradients()
        chex.assert_trees_all_equal(*gradients)
        assert len(transport.order) == 2 * 3 * 8
        assert transport.seconds_until_poll() is None

    def test_a_receiver_that_posts_in_another_order_stops_the_run(self):
        class Reordering(OrderedTransport):
            def _receive(self, link, key):
                if key.input.microbatch == 3 and link.announced:
                    link.announced.append(key)
                    key = link.announced.popleft()
                super()._receive(link, key)

        devices = dict(enumerate(jax.devices()[:2]))
        ends = Ends(Reordering(devices_of(devices)), devices, [0, 0])
        ends.begin()
        for n in range(5):
            ends.offer(n, numbers(n))
            ends.produced(n)
        with pytest.raises(OrderError):
            ends.receive(range(5))
