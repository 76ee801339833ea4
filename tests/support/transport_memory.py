"""What every transport must let go of: scenarios as in `transport_conformance.py`."""

import gc
import time
import weakref

import jax
import numpy as np
import psutil

from tests.support.transport_ends import KIB, MIB, numbers


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
