"""One of two ranks that send messages to each other by every transport in turn; started by `hop.py`.

rrfp launch -n 2 -m benchmarks.runtime.hop_rank FILE ROUNDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.pair import Line
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.transport.choice import TransportName

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
TRANSPORTS: Sequence[TransportName] = ("socket", "nixl")
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


def main(file: str, rounds: str) -> None:
    """Measure on both ranks; rank 0 writes."""
    world = join()
    lines: dict[str, Line] = {name: Line(world, name) for name in TRANSPORTS}
    found: dict[str, Any] = {name: by_size(lines, size, int(rounds)) for name, size in SIZES.items()}
    idle = {name: world.gather("shares of a core", waiting(line))[1] for name, line in lines.items()}
    parts = {name: several(lines["nixl"], SIZES[name], int(rounds)) for name in ("64 KiB", "1 MiB")}
    if world.rank == 0:
        written = {"sizes": found, "waiting": idle, "several": parts}
        Path(file).write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
