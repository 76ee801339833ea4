"""The ends of a transport that are in one process, as scenarios of conformance use them."""

import time

import jax
import numpy as np

from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.runtime.transport.protocol import Key

LIMIT_SECONDS = 10.0
KIB, MIB = 2**10, 2**20


class Ends:
    """The ends of a transport that are in this process. Stage 0 sends to the other stages in turn."""

    def __init__(self, transport, devices, owners, world=None):
        self.transport, self.devices, self.owners, self.world = transport, devices, owners, world
        self.apart = world is not None
        self.round = 0
        self.targets = range(1, len(owners))
        self._forget()

    def begin(self, observer=None):
        """The next round."""
        self.round = self.round + 1 if self.world is None else self.world.next_round()
        self._forget()
        self.transport.begin(self.round, observer or self)

    def _forget(self):
        self.arrived, self.memory = {}, []
        self._offered = set()
        self.pulled = set()  # what is coming to here and has not arrived yet

    def coming(self, key):
        self.memory.append(("coming", key))
        self.pulled.add(key)

    def delivered(self, key):
        self.memory.append(("delivered", key))

    @property
    def held(self):
        """What was offered here and is not delivered yet."""
        return self._offered - {key for what, key in self.memory if what == "delivered"}

    def key(self, n, target=None):
        target = self.targets[n % len(self.targets)] if target is None else target
        return Key(self.round, target, Task(FORWARD, 0, n).input)

    def owns(self, stage):
        return stage in self.devices

    @property
    def sends(self):
        return self.owns(0)

    def moves(self, n):
        """Whether a message goes from one device to another, and one of them is here."""
        target = self.key(n).stage
        local = self.owns(0) and self.owns(target)
        return self.devices[0] != self.devices[target] if local else self.sends or self.owns(target)

    def put(self, hosts, source=0):
        return [jax.device_put(host, self.devices[source]) for host in hosts]

    def offer(self, n, hosts, source=0, target=None):
        """Offer arrays on their sender; their producer has ended."""
        if self.owns(source):
            self._offered.add(self.key(n, target))
            self.transport.offer(self.key(n, target), self.put(hosts, source))

    def produced(self, n, at=None, source=0, target=None):
        if self.owns(source):
            self.transport.produced(self.key(n, target), time.perf_counter() if at is None else at)

    def poll(self):
        for arrival in self.transport.poll():
            key = arrival.key
            assert key.round == self.round, f"{key} of round {key.round} in round {self.round}"
            assert self.owns(key.stage), f"{key} came to the wrong process"
            assert key not in self.arrived, f"{key} arrived twice"
            self.arrived[key] = arrival
            self.pulled.discard(key)

    def receive(self, numbers, target=None, seconds=LIMIT_SECONDS):
        """Sleep as the driver does until what is for this process has come; the arrivals by number."""
        wanted = {n: self.key(n, target) for n in numbers if self.owns(self.key(n, target).stage)}
        self.until(lambda: all(key in self.arrived for key in wanted.values()), seconds)
        return {n: self.arrived[key] for n, key in wanted.items()}

    def until(self, condition, seconds=LIMIT_SECONDS):
        deadline = time.monotonic() + seconds
        self.poll()
        while not condition():
            assert time.monotonic() < deadline, f"still waiting; {len(self.arrived)} arrived"
            seconds = self.transport.seconds_until_poll()
            if self.apart:
                self.world.mailbox.sleep(1.0 if seconds is None else seconds)
            else:
                assert seconds is not None, "it need not be polled although something is on its way"
                time.sleep(seconds)
            self.poll()

    def settle(self):
        """Until nothing is on its way any more, in any process."""
        self.until(lambda: not self.held and not self.pulled)
        self.meet()

    def meet(self, value=None):
        """Wait for the other processes; every process's value."""
        return [value] if self.world is None else self.world.gather("a meeting", value)

    def check(self, arrival, hosts):
        """The arrays are on their stage's device, and equal to the bit."""
        assert len(arrival.arrays) == len(hosts)
        for array, host in zip(arrival.arrays, map(np.asarray, hosts), strict=True):
            assert array.device == self.devices[arrival.key.stage]
            assert (array.shape, array.dtype) == (host.shape, host.dtype)
            assert np.asarray(array).tobytes() == host.tobytes()

    def carry(self, numbers, hosts):
        """Offer, produce, receive and check; `hosts(n)` are the arrays."""
        for n in numbers:
            self.offer(n, hosts(n))
            self.produced(n)
        for n, arrival in self.receive(numbers).items():
            self.check(arrival, hosts(n))
        self.settle()


def numbers(n, size=KIB // 4):
    """Arrays that differ for every message."""
    return [np.arange(size, dtype=np.float32) + 1000 * n]
