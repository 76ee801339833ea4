"""One of the processes that `benchmarks.studies.store_scale` starts: what messages cost on this machine.

rrfp launch -n 8 -m benchmarks.studies.scale.measure FILE

Calls of the store as the runtime makes them, by 1, 4 and 16 clients at once; and the whole way of a
message, from a driver that posts it to another one that sleeps and is woken by it, by both carriers, between
two processes. Rank 0 writes what `scale.costs.MessageCosts` reads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time, thread_time
from typing import Any

from benchmarks.harness import median_and_p99
from rrfp_jax.runtime._jax import key_value_store
from rrfp_jax.runtime.run.consensus import BLOCK, Agreement, Carrier, CarrierName
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.world import World

CLIENTS = ((1, 1), (4, 1), (8, 2))
"""Processes, and threads in each."""

CALLS = 400
"""Of each client; of deletions there is one a block."""

BATCH = b"x" * 40

PULSES, ROUNDS = 60, 5
"""How often a leader tells its followers something; of these rounds the quietest counts."""

PULSE_SECONDS = 10e-3

BURST = 300
"""Messages that are posted in a row."""


def main(file: Path) -> None:
    """Measure everything; all processes together."""
    world = join()
    calls = {
        kind: {count * threads: calls_of(world, kind, count, threads) for count, threads in CLIENTS}
        for kind in ("set", "get", "delete")
    }
    carriers: tuple[CarrierName, ...] = ("kv", "socket")
    ways = {name: ways_of(world, name) for name in carriers}
    found = {"calls": calls, "ways": ways, "host": host_seconds(world)}
    found |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if world.rank == 0:
        file.write_text(json.dumps(found), encoding="utf-8")


def calls_of(world: World, kind: str, processes: int, threads: int) -> dict[str, float]:
    """One kind of call by so many clients: seconds of one, calls per second of all, CPU per call."""
    folder = f"scale/{kind}/{processes}/{world.rank}"
    prepared = [_client(kind, f"{folder}/{number}") for number in range(threads)]
    seconds: list[float] = []

    def work(calls: Sequence[Callable[[], object]]) -> None:
        for call in calls:
            began = perf_counter()
            call()
            seconds.append(perf_counter() - began)

    workers = [threading.Thread(target=work, args=(calls,)) for calls in prepared]
    world.gather("everybody to be ready", None)
    service, own, began = service_seconds(), process_time(), perf_counter()
    if world.rank < processes:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    lasted = perf_counter() - began
    gathered = world.gather("all calls", [len(seconds), lasted, process_time() - own])
    used = service_seconds() - service
    total = sum(count for count, *_ in gathered)
    return {
        **(median_and_p99(seconds) if seconds else {}),
        "per_second": total / max(lasted for _, lasted, _ in gathered[:processes]),
        "server_cpu_us": used / total * 1e6,
        "client_cpu_us": sum(cpu for *_, cpu in gathered[:processes]) / total * 1e6,
    }


def _client(kind: str, folder: str) -> list[Callable[[], object]]:
    """The calls of one client, with all that they need in the store."""
    store = key_value_store()
    if kind == "set":
        return [
            lambda n=n: store.key_value_set_bytes(f"{folder}/{n // BLOCK}/{n}", BATCH)  # type: ignore[misc]
            for n in range(CALLS)
        ]
    if kind == "get":
        store.key_value_set_bytes(f"{folder}/0", BATCH)
        return [lambda: store.blocking_key_value_get_bytes(f"{folder}/0", 2000)] * CALLS
    blocks = range(max(CALLS // BLOCK, 1))
    for block in blocks:
        for n in range(BLOCK):
            store.key_value_set_bytes(f"{folder}/{block}/{n}", BATCH)
    return [lambda b=b: store.key_value_delete(f"{folder}/{b}") for b in blocks]  # type: ignore[misc]


def ways_of(world: World, name: CarrierName) -> list[float]:
    """Seconds that messages took between ranks 0 and 1, of the round with the least mean.

    Rank 0 tells the other something again and again, and that one answers. One machine has one clock.
    """
    pairs = [[rank, rank + 1] for rank in range(0, world.size, 2)]
    carrier = Agreement(world, pairs, name, "leader").carrier
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        world.gather("everybody to be ready", None)
        own: list[float] = []
        if world.rank < 2:
            with carrier:
                own = _follow(world, carrier) if world.rank else _lead(world, carrier)
        rounds.append([way for part in world.gather("the ways of messages", own) for way in part])
    return min(rounds, key=fmean)


def _lead(world: World, carrier: Carrier) -> list[float]:
    ways: list[float] = []
    began = perf_counter()
    for pulse in range(1, PULSES + 1):
        carrier.post([perf_counter()])
        while perf_counter() < (until := began + pulse * PULSE_SECONDS) or len(ways) < pulse:
            _sleep(world, max(until - perf_counter(), 1e-3))
            ways += _ways(carrier)
    return ways


def _follow(world: World, carrier: Carrier) -> list[float]:
    ways: list[float] = []
    while len(ways) < PULSES:
        _sleep(world, 1.0)
        for way in _ways(carrier):
            ways.append(way)
            carrier.post([perf_counter()])
    return ways


def _ways(carrier: Carrier) -> list[float]:
    """Of what has come."""
    return [perf_counter() - sent for (sent,) in carrier.poll()]


def _sleep(world: World, seconds: float) -> None:
    assert world.mailbox is not None
    world.mailbox.sleep(seconds)


def host_seconds(world: World) -> dict[str, float]:
    """What a message by socket takes of the driver that posts it, and of the one that gets it."""
    groups = [[rank, rank + 1] for rank in range(0, world.size, 2)]
    carrier = Agreement(world, groups, "socket", "leader").carrier
    world.gather("everybody to have a carrier", None)
    began, got = thread_time(), 0  # a sleep takes none of it
    if world.rank == 0:
        for number in range(BURST):
            carrier.post([number])
    while world.rank == 1 and got < BURST:
        _sleep(world, 1.0)
        got += len(carrier.poll())
    seconds = thread_time() - began
    post, take, *_ = world.gather("seconds", seconds / BURST)
    return {"post": post, "take": take}


def service_seconds() -> float:
    """The CPU time so far of the process with the coordination service, a child of the launcher."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields: list[Any] = (folder / "stat").read_text("ascii").rpartition(")")[2].split()
            if int(fields[1]) == os.getppid() and "run/coordinator.py" in (folder / "cmdline").read_text(
                "utf-8"
            ):
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise RuntimeError("there is no coordination service beside this process: start it with rrfp launch")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
