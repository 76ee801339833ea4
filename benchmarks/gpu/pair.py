"""Two processes with a device each, or one between them, over the runtime's own transport.

Both ranks do the same steps. Between two processes of one machine
`time.perf_counter` is one clock.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.work import QUICK_SIZES, SIZES, Bench, milliseconds, seconds_until_ready
from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.choice import TransportName, between_processes
from rrfp_jax.runtime.transport.mailed import MailedTransport
from rrfp_jax.runtime.transport.protocol import Endpoints, Key, Transport

Way: TypeAlias = TransportName | Literal["mail"]
"""A transport; "mail" is what runs use: small messages by mail, others by what "auto" chooses."""

STREAM = 4
"""Messages offered at once to measure throughput."""


class Line:
    """This rank's end of a transport between ranks 0 and 1."""

    def __init__(self, world: World, name: Way = "socket") -> None:
        assert world.mailbox is not None
        self.world, self._mailbox = world, world.mailbox
        ends = Endpoints(world, [[0], [1]], {world.rank: jax.local_devices()[:1]}, [1 - world.rank])
        self._transport: Transport = between_processes("auto" if name == "mail" else name, ends).transport
        if name == "mail":
            self._transport = MailedTransport(ends, self._transport)
        self._sent = 0
        self._round = 0

    def together(self, what: str) -> float:
        """Both ranks have come so far; the time."""
        self.world.gather(what, None)
        self._round, self._sent = self.world.next_round(), 0
        self._transport.begin(self._round)
        self.world.gather(f"{what}, begun", None)
        return perf_counter()

    def offer(self, *arrays: jax.Array) -> Key:
        """Offer arrays as one message, possibly not computed yet, to the other rank."""
        key = Key(self._round, 1 - self.world.rank, Task(FORWARD, 0, self._sent).input)
        self._sent += 1
        self._transport.offer(key, arrays)
        return key

    def send(self, *arrays: jax.Array, count: int = 1) -> None:
        """Offer arrays that are there as one message, some times over."""
        for _ in range(count):
            self._transport.produced(self.offer(*arrays), perf_counter())

    def finish(self, key: Key, array: jax.Array) -> float:
        """Wait for an offered array to be computed, and say so; when that was (s)."""
        while not array.is_ready():  # type: ignore[attr-defined]
            self._mailbox.sleep(2e-5)
        at = perf_counter()
        self._transport.produced(key, at)
        return at

    def receive(self, count: int = 1) -> jax.Array:
        """Wait for arrays, as the driver does; the last one."""
        while True:
            for arrival in self._transport.poll():
                count -= 1
                if count == 0:
                    return arrival.arrays[0]
            seconds = self._transport.seconds_until_poll()
            self._mailbox.sleep(1.0 if seconds is None else min(seconds, 1.0))


def by_size(line: Line, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """A message there and back, halved, and the rate of several offered at once, by size."""
    found = {}
    for name, size in sizes.items():
        values = np.random.default_rng(size).random(size // 4, np.float32)
        array = jax.block_until_ready(jax.device_put(values))
        count = rounds if size >= 2**24 else 8 * rounds
        trips = []
        line.together(f"messages of {name}")
        for _ in range(count + 1):
            began = perf_counter()
            if line.world.rank == 0:
                line.send(array)
                back = line.receive()
                trips.append(perf_counter() - began)
            else:
                back = line.receive()
                line.send(back)
        if not np.array_equal(np.asarray(back), values):
            raise RuntimeError(f"a message of {name} came back changed")
        began = line.together(f"a stream of {name}")
        if line.world.rank == 0:
            line.send(array, count=STREAM)
            line.receive()
        else:
            line.send(line.receive(STREAM)[:1])
        seconds = perf_counter() - began
        hop = float(np.median(trips[1:])) / 2 if trips else 0.0
        found[name] = {
            "hop_us": round(1e6 * hop, 1),
            "stream_GB_per_s": round(STREAM * size / seconds / 1e9, 3),
        }
    return found


def overlap(line: Line, bench: Bench) -> dict[str, Any]:
    """A pull on rank 1 alone, a program there alone, and both at once: what of the shorter one is hidden."""
    array = jax.block_until_ready(jnp.ones(bench.large // 16, jnp.float32))  # about as long as the program

    def once() -> list[float]:
        times = []
        for pull, compute in ((True, False), (False, True), (True, True)):
            began = line.together("a pull and a program")
            if line.world.rank == 0:
                if pull:
                    line.send(array)
            else:
                running = bench.long(bench.x) if compute else bench.x
                if pull:
                    line.receive()
                running.block_until_ready()
            times.append(perf_counter() - began)
        return times

    pull, compute, both = bench.median(once)
    hidden = (pull + compute - both) / min(pull, compute)
    return {
        "bytes": array.nbytes,
        "pull_ms": milliseconds(pull),
        "program_ms": milliseconds(compute),
        "both_ms": milliseconds(both),
        "share_of_the_shorter_one_hidden": round(hidden, 3),
    }


def offered_early(line: Line, bench: Bench) -> dict[str, Any]:
    """An output offered before it exists: when it arrives, with and without a long program behind it."""

    def once() -> list[float]:
        times = []
        for busy in (False, True):
            line.together("an output offered early")
            if line.world.rank == 0:
                array = bench.short(bench.x)
                key = line.offer(array)
                behind = bench.long(bench.x) if busy else array
                ended = line.finish(key, array)
                arrived = 0.0
                behind.block_until_ready()
            else:
                line.receive()
                ended, arrived = 0.0, perf_counter()
            both = line.world.gather("when it was made and when it arrived", [ended, arrived])
            times.append(both[1][1] - both[0][0])
        return times

    alone, busy = bench.median(once)
    (long,) = seconds_until_ready(perf_counter(), bench.long(bench.x))
    return {
        "bytes": int(bench.x.nbytes),
        "arrives_after_its_program_ms": milliseconds(alone),
        "with_a_long_program_behind_ms": milliseconds(busy),
        "long_program_ms": milliseconds(long),
        "waits_for_later_programs": busy - alone > 0.5 * long,
    }


def by_nixl(world: World, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """The same from device to device, where NIXL works between the two; else why not."""
    try:
        line = Line(world, "nixl")
    except UsageError as refused:
        return {"not_measured": str(refused)}
    return by_size(line, sizes, rounds)


def pair(quick: bool) -> dict[str, Any]:
    """Measure on both ranks; the one that received knows."""
    world = join()
    sizes, bench, line = QUICK_SIZES if quick else SIZES, Bench.of(quick), Line(world)
    socket = world.gather("socket", by_size(line, sizes, bench.rounds))[0]
    nixl = world.gather("nixl", by_nixl(world, sizes, bench.rounds))[0]
    both = world.gather("overlap", overlap(line, bench))[1]
    early = world.gather("offered early", offered_early(line, bench))[0]
    return {"socket": socket, "nixl": nixl, "overlap": both, "offered_early": early}
