"""What every transport must do, written once against the protocol.

A scenario is a function of `Ends`: every process of the transport runs it, and what a process does not own
it skips. So the same lines test a transport inside one process and one between several.
"""

import gc
import time
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil

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


def sender_forgets(ends):
    """The only reference goes right after the offer, and its memory must not be used for anything else."""
    ends.begin()
    for n in range(8):
        ends.offer(n, numbers(n, MIB // 4))
    gc.collect()
    if ends.sends:
        jax.block_until_ready([ends.put(numbers(-1, MIB // 4)) for _ in range(16)])
    for n in range(8):
        ends.produced(n)
    for n, arrival in ends.receive(range(8)).items():
        ends.check(arrival, numbers(n, MIB // 4))
    ends.settle()


def memory_is_witnessed(ends):
    """Taken at the receiver and given back at the sender: each once, and nowhere else."""
    ends.begin()
    for n in range(6):
        ends.offer(n, numbers(n))
    for n in range(6):
        ends.produced(n)
    ends.receive(range(6))
    ends.settle()
    keys = [ends.key(n) for n in range(6)]
    expected = [("coming", key) for key in keys if ends.owns(key.stage)]
    expected += [("delivered", key) for key in keys if ends.sends]
    assert sorted(ends.memory) == sorted(expected)


class Forgetful:
    """An observer that remembers nothing."""

    def coming(self, key):
        pass

    def delivered(self, key):
        pass


def witness_is_let_go(ends):
    """When a round has ended, or was broken off: an observer knows all that a step has held."""
    for broken in (False, True):
        witness = Forgetful()
        gone = weakref.ref(witness)
        ends.begin(witness)
        for n in range(2):
            ends.offer(n, numbers(n))
            ends.produced(n)
        ends.receive(range(2))
        ends.meet()
        ends.transport.finish(broken=broken)
        del witness
        assert gone() is None
        ends.meet()
    ends.poll()


TRANSFERS, IN_FLIGHT, A_ROUND = 10_000, 16, 500

TOLERATED = 24 * MIB
"""Growth of memory over 10,000 transfers of 64 KiB, 625 MiB in all: what allocators keep of at most 16 in
flight at either end, with room for their caches. A leak of one array in 26 would show."""


def memory(ends):
    """Ten thousand transfers leave nothing behind."""
    process = psutil.Process()

    def carry(count):
        for _ in range(count // A_ROUND):
            ends.begin()
            hosts = [np.zeros(16 * KIB, np.float32)]
            for n in range(A_ROUND):
                if ends.sends:
                    ends.until(lambda: len(ends.held) < IN_FLIGHT)
                ends.offer(n, hosts)
                ends.produced(n)
                if not ends.sends:
                    ends.receive([n])
                    del ends.arrived[ends.key(n)]
            ends.settle()
        time.sleep(0.1)  # what is copied has been
        ends.poll()

    carry(2 * A_ROUND)  # pools and caches fill
    gc.collect()
    before = process.memory_info().rss, len(jax.live_arrays())
    carry(TRANSFERS)
    gc.collect()
    grown, arrays = process.memory_info().rss - before[0], len(jax.live_arrays())
    assert arrays == before[1], f"{arrays} live arrays, {before[1]} before"
    assert grown < TOLERATED, f"{grown / MIB:.1f} MiB more than before"


OWNERS = {"SocketTransport": [0, 1], "NixlTransport": [0, 1], "MailedTransport": [0, 1]}
"""What is tested between two processes: the rank of each stage."""


def out_of_order(ends):
    """Whatever is produced comes, although offered later than what is not."""
    ends.begin()
    order = [3, 1, 5, 0, 4, 2]
    for n in range(6):
        ends.offer(n, numbers(n))
    for n in order:
        ends.produced(n)
        for arrival in ends.receive([n]).values():
            ends.check(arrival, numbers(n))
        ends.meet()
    assert set(ends.receive(range(6))) == {n for n in order if ends.owns(ends.key(n).stage)}
    ends.settle()


def all_at_once(ends):
    """A hundred in one go, produced in reverse."""
    ends.begin()
    for n in range(100):
        ends.offer(n, numbers(n))
    for n in reversed(range(100)):
        ends.produced(n)
    for n, arrival in ends.receive(range(100)).items():
        ends.check(arrival, numbers(n))
    ends.settle()


def both_ways(ends):
    """Two stages send to each other at the same time."""
    last = len(ends.owners) - 1
    ends.begin()
    for n in range(20):
        for source, target in ((0, last), (last, 0)):
            ends.offer(n, numbers(n + source, MIB // 4), source, target)
            ends.produced(n, None, source, target)
    for target, source in ((0, last), (last, 0)):
        for n, arrival in ends.receive(range(20), target).items():
            ends.check(arrival, numbers(n + source, MIB // 4))
    ends.settle()


def offered_twice(ends):
    ends.begin()
    ends.offer(0, numbers(0))
    if ends.sends:
        try:
            ends.offer(0, numbers(1))
        except ValueError as error:
            assert "input of F0 on stage 1 has been offered before" in str(error)
        else:
            raise AssertionError("nothing was raised")
    ends.produced(0)
    for arrival in ends.receive([0]).values():
        ends.check(arrival, numbers(0))
    ends.settle()
    ends.begin()  # the same names, in another round
    ends.carry([0], lambda n: numbers(7))


def a_later_round(ends):
    """A sender may be ahead: its messages wait until the receiver begins that round, however late."""
    ends.begin()
    if ends.sends:
        ends.begin()
    for n in range(4):
        ends.offer(n, numbers(n))
        ends.produced(n)
    ends.meet()
    if not ends.sends:
        for _ in range(10):
            ends.poll()
            time.sleep(5e-3)
        assert not ends.arrived and not ends.pulled
        assert ends.transport.seconds_until_poll() is None
        ends.begin()
    for n, arrival in ends.receive(range(4)).items():
        ends.check(arrival, numbers(n))
    ends.settle()


def large(ends):
    ends.begin()
    ends.carry(range(1), lambda n: numbers(n, 16 * MIB))


def tiny(ends):
    """One number, a scalar, nothing at all: alone and together."""
    shapes = [(), (1,), (0,), (0, 3), (3, 0, 2), (1, 1, 1)]
    arrays = [np.full(shape, 7, np.float32) for shape in shapes]
    ends.begin()
    ends.carry(range(2 * len(shapes)), lambda n: [arrays[n // 2]])
    ends.begin()
    ends.carry(range(2), lambda n: arrays)


def mixed_dtypes(ends):
    random = np.random.default_rng(0)
    dtypes = [ml_dtypes.bfloat16, np.float16, np.int8, np.uint8, np.int32, ml_dtypes.float8_e4m3fn]
    arrays = [random.integers(0, 100, (3, 5)).astype(dtype) for dtype in dtypes]
    arrays += [random.integers(0, 2, 7).astype(bool), np.float32([np.nan, np.inf, -0.0, 1e-45])]
    ends.begin()
    ends.carry(range(4), lambda n: arrays[n:] + arrays[:n])


def no_arrays(ends):
    ends.begin()
    ends.carry(range(4), lambda n: [])


def the_same_array_twice(ends):
    """In one message, and in several."""
    ends.begin()
    if ends.sends:
        array = ends.put(numbers(1))[0]
        for n in range(3):
            ends.transport.offer(ends.key(n), [array, array])
            ends.produced(n)
    for arrival in ends.receive(range(3)).values():
        ends.check(arrival, numbers(1) * 2)
    ends.settle()


def slow_reader(ends):
    """Fifty offers to somebody who does not look for two seconds hold nobody up."""
    ends.begin()
    began = time.perf_counter()
    for n in range(50):
        ends.offer(n, numbers(n, MIB // 4))
        ends.produced(n)
    assert time.perf_counter() - began < 1.0
    if ends.apart and not ends.sends:
        time.sleep(2.0)
    for n, arrival in ends.receive(range(50)).items():
        ends.check(arrival, numbers(n, MIB // 4))
    ends.settle()


@partial(jax.jit, static_argnums=1)
def compute(x, rounds):
    return jax.lax.fori_loop(0, rounds, lambda i, x: jnp.sin(x) + 1, x)


def still_computed(ends):
    """What is offered does not exist yet, and the sender forgets it at once."""
    start, rounds = numbers(0, 64 * KIB)[0], 300
    expected = [np.asarray(compute(start, rounds))]
    ends.begin()
    ends.meet()
    if ends.sends:
        jax.block_until_ready(compute(jax.device_put(start, ends.devices[0]), rounds))  # compiles
        outputs = [compute(jax.device_put(start + n, ends.devices[0]), rounds) for n in (1, 0, 0)]
        for n, output in enumerate(outputs):
            ends.transport.offer(ends.key(n), [output])
        assert not output.is_ready()
        token = compute(jax.device_put(start, ends.devices[0]), 1)  # runs after them
        del outputs, output
        gc.collect()
        token.block_until_ready()
        for n in (2, 1, 0):
            ends.produced(n)
    for n, arrival in ends.receive(range(3)).items():
        if n:
            ends.check(arrival, expected)
    ends.settle()


def patience(ends):
    """None when nothing is on its way, so that one sleeps until a message comes."""
    ends.begin()
    ends.settle()
    assert ends.transport.seconds_until_poll() is None
    ends.meet()
    ends.offer(0, numbers(0))
    ends.produced(0)
    ends.receive([0])
    ends.settle()
    assert ends.transport.seconds_until_poll() is None


def when_produced(ends):
    """An arrival tells when its program ended, on this process's clock."""
    ends.begin()
    at = time.perf_counter() - 0.5
    ends.offer(0, numbers(0))
    ends.produced(0, at)
    arrivals = ends.receive([0])
    for arrival in arrivals.values():
        if ends.moves(0):
            assert abs(arrival.produced - ends.meet(at)[0]) < 5e-3
    if not arrivals:
        ends.meet(at)
    ends.settle()


def reset(ends):
    """What was on its way in a round that was broken off never comes, and disturbs no later one."""
    ends.begin()
    for n in range(6):
        ends.offer(n, numbers(n))
    ends.produced(0)
    ends.meet()
    receiver = not ends.apart or not ends.sends
    if receiver:
        ends.poll()
        ends.produced(5)  # by a sender in this process
        ends.transport.finish(broken=True)
        assert ends.transport.seconds_until_poll() is None
    ends.meet()
    for n in range(1, 5):  # the sender has not heard of it
        ends.produced(n)
    if ends.apart:
        ends.offer(6, numbers(6))
        ends.produced(6)
    ends.meet()
    if not receiver:
        ends.transport.finish(broken=True)
    ends.arrived = {}
    ends.poll()
    assert not ends.arrived
    ends.begin()
    for n in range(6):
        ends.offer(n, numbers(n + 50))
        ends.produced(n)
    for n, arrival in ends.receive(range(6)).items():
        ends.check(arrival, numbers(n + 50))
    ends.until(lambda: not ends.pulled)
    ends.meet()


ANYWHERE = [
    out_of_order,
    all_at_once,
    both_ways,
    offered_twice,
    large,
    tiny,
    mixed_dtypes,
    no_arrays,
    the_same_array_twice,
    slow_reader,
    still_computed,
    sender_forgets,
    memory_is_witnessed,
    witness_is_let_go,
    patience,
    when_produced,
]


BETWEEN = {
    "SocketTransport": [*ANYWHERE, a_later_round, memory, reset],
    "NixlTransport": [*ANYWHERE, a_later_round, memory, reset],
    "MailedTransport": [*ANYWHERE, a_later_round, memory, reset],
}
"""`reset` is the last, because what the sender holds then is never pulled."""
