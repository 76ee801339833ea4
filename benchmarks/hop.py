"""A message between two processes, by sockets, NIXL and mail in turns: how long, what rate, what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.pair import Line, Way
from benchmarks.harness import Aim, Found, bench, on_ranks, say
from rrfp_jax.runtime.run.join import join

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
TRANSPORTS: Sequence[Way] = ("socket", "nixl", "mail")
BLOCKS = 5
"""Of trips there and back by each transport, in turns."""
SEVERAL = 8
"""Arrays in one message; an activation with its masks and positions has about as many."""
STREAM, STREAMS = 4, 5
"""Messages offered at once, to measure the rate, and how often in each block."""
IDLE_SECONDS = 2.0


def trips(line: Line, array: jax.Array, count: int) -> list[float]:
    """Seconds of messages there and back, on rank 0; the first of each call is not counted."""
    found = []
    line.together("messages there and back")
    for _ in range(count + 1):
        began = perf_counter()
        if line.world.rank == 0:
            line.send(array)
            line.receive()
            found.append(perf_counter() - began)
        else:
            line.send(jax.block_until_ready(line.receive()))
    return found[1:]


def streams(line: Line, array: jax.Array, count: int) -> list[float]:
    """Bytes per second of several messages offered at once, up to a short answer, on rank 0; the first is not
    counted."""
    short = array[:1].block_until_ready()
    rates = []
    line.together("messages at once")
    for _ in range(count + 1):
        began = perf_counter()
        if line.world.rank == 0:
            line.send(array, count=STREAM)
            line.receive()
            rates.append(STREAM * array.nbytes / (perf_counter() - began))
        else:
            jax.block_until_ready(line.receive(STREAM))
            line.send(short)
    return rates[1:]


def waiting(line: Line) -> float:
    """Share of a core that rank 1 takes while it waits for a message."""
    short = jax.block_until_ready(jax.numpy.ones(16))
    trips(line, short, 1)
    line.together("a wait")
    began, busy = perf_counter(), process_time()
    if line.world.rank == 0:
        sleep(IDLE_SECONDS)
        line.send(short)
    else:
        line.receive()
    return (process_time() - busy) / (perf_counter() - began)


def several(line: Line, size: int, rounds: int) -> dict[str, float]:
    """A message of several arrays and a short answer (us): from where they lie, or packed before."""
    pack = jax.jit(jnp.concatenate)
    arrays = [jax.block_until_ready(jnp.full(size // 4 // SEVERAL, i, jnp.float32)) for i in range(SEVERAL)]
    jax.block_until_ready(pack(arrays))
    short = arrays[0][:1].block_until_ready()
    times: dict[str, list[float]] = {"in place": [], "packed": []}
    for _ in range(BLOCKS):
        for name, own in times.items():
            line.together("a message of several arrays")
            for _ in range(-(-rounds // BLOCKS)):
                began = perf_counter()
                if line.world.rank == 0:
                    line.send(*arrays if name == "in place" else [jax.block_until_ready(pack(arrays))])
                    line.receive()
                    own.append(perf_counter() - began)
                else:
                    line.receive()
                    line.send(short)
    return {name: 1e6 * median(own) for name, own in times.items() if own}


def by_size(lines: Mapping[str, Line], size: int, rounds: int) -> dict[str, dict[str, float]]:
    """What each transport takes for messages of a size, in turns."""
    values = np.random.default_rng(size).random(size // 4, np.float32)
    array = jax.block_until_ready(jax.device_put(values))
    count = max(rounds * 2**20 // size, 4) if size > 2**20 else rounds
    times: dict[str, list[float]] = {name: [] for name in lines}
    rates: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(BLOCKS):
        for name, line in lines.items():
            times[name] += trips(line, array, -(-count // BLOCKS))
            rates[name] += streams(line, array, STREAMS)
    if lines["socket"].world.rank:
        return {}
    return {
        name: {
            "hop_us": 1e6 * median(times[name]) / 2,
            "shortest_us": 1e6 * min(times[name]) / 2,
            "GB_per_s": median(rates[name]) / 1e9,
        }
        for name in lines
    }


def both_ranks(rounds: int) -> dict[str, Any]:
    world = join()
    lines: dict[str, Line] = {name: Line(world, name) for name in TRANSPORTS}
    return {
        "sizes": {name: by_size(lines, size, rounds) for name, size in SIZES.items()},
        "waiting": {name: world.gather("shares of a core", waiting(line))[1] for name, line in lines.items()},
        "several": {name: several(lines["nixl"], SIZES[name], rounds) for name in ("64 KiB", "1 MiB")},
    }


RUN_SECONDS = 600.0
MOST_OF_A_CORE = 3.0


@bench(
    "A message between two processes, by sockets, by NIXL and by mail: how long, at what rate, at what cost?",
    minutes="1",
    aims="64 KiB: mail before NIXL before sockets; from 1 MiB on NIXL not slower; a wait 3 % of a core",
)
def hop(rounds: int = 200) -> Found:
    """Half of the time there and back, median of all rounds; of messages above 1 MiB there are fewer. The
    rate is that of four messages offered at once. A process that waits for a message is measured for two
    seconds."""
    found = on_ranks(2, both_ranks, rounds, seconds=RUN_SECONDS)
    for name, own in found["sizes"].items():
        for transport, row in own.items():
            rate = f"{row['shortest_us']:7.0f} us shortest, {row['GB_per_s']:7.2f} GB/s"
            say(f"{name:8}  {transport:9}  {row['hop_us']:8.0f} us, {rate}")
    say(f"in several arrays and a short answer, by NIXL, us: {found['several']}")
    say(f"shares of a core while waiting: {found['waiting']}")
    return Found(found, aims_of(found))


def aims_of(found: Mapping[str, Any]) -> list[Aim]:
    sizes = found["sizes"]
    late = sizes["64 KiB"]["nixl"]["hop_us"] / sizes["64 KiB"]["socket"]["hop_us"]
    aims = [Aim("hop of 64 KiB by NIXL, of that by sockets", late, 1.0, "times")]
    for name in ("1 MiB", "16 MiB", "64 MiB"):
        rate = sizes[name]["nixl"]["GB_per_s"] / sizes[name]["socket"]["GB_per_s"]
        aims.append(Aim(f"rate of {name} by NIXL, of that by sockets", rate, 1.0, "times", at_least=True))
    share = 100 * found["waiting"]["nixl"]
    soon = sizes["64 KiB"]["mail"]["hop_us"] / sizes["64 KiB"]["nixl"]["hop_us"]
    aims.append(Aim("hop of 64 KiB by mail, of that by NIXL", soon, 1.0, "times"))
    return [*aims, Aim("a process that waits, by NIXL", share, MOST_OF_A_CORE, "% of a core")]
