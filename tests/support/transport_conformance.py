"""What every transport must do, written once against the protocol.

A scenario is a function of `Ends`: every process of the transport runs it, and what a process does not own
it skips. So the same lines test a transport inside one process and one between several.
"""

import gc
import time
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.support.transport_ends import KIB, MIB, numbers
from tests.support.transport_memory import memory, memory_is_witnessed, sender_forgets, witness_is_let_go

OWNERS = {"SocketTransport": [0, 1], "NixlTransport": [0, 1]}
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
}
"""`reset` is the last, because what the sender holds then is never pulled."""
