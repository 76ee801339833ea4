"""Part 1: what the driver assumes of the device, tried out.

readiness   is an array ready when its program has ended, or only when later ones have, too; are all
            outputs of a program ready together (the driver looks at the first)
in_flight   how many programs can be queued before a dispatch blocks
threads     programs of another thread keep their turn; do copies to and from the host wait for programs
            that were dispatched before them; does a program whose input is on its way hold up a later one
copies      host to device, device to host, on the device, and to another device, by size
socket      the runtime's transport between two processes, by size (`pair.py`)
nixl        the same from device to device, or why that cannot be
overlap     does a pull go on while the receiver computes; does an offer wait for the sender's later programs
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.check import Findings
from benchmarks.gpu.pair import pair
from benchmarks.gpu.work import (
    QUICK_SIZES,
    SIZES,
    Bench,
    median_seconds,
    milliseconds,
    seconds_until_ready,
)
from benchmarks.harness import on_ranks


def readiness(bench: Bench) -> dict[str, Any]:
    """How long after its dispatch a short program's result is ready, alone and with a long one behind it."""

    def once() -> list[float]:
        began = perf_counter()
        (alone,) = seconds_until_ready(began, bench.short(bench.x))
        began = perf_counter()
        a, b = bench.short(bench.x), bench.long(bench.x)
        looked, ended = seconds_until_ready(began, a, b)
        began = perf_counter()
        a, b = bench.short(bench.x), bench.long(bench.x)
        a.block_until_ready()
        blocked = perf_counter() - began
        b.block_until_ready()
        return [alone, looked, blocked, ended]

    alone, looked, blocked, ended = bench.median(once)
    lag = (looked - alone) / max(ended - alone, 1e-9)
    return {
        "alone_ms": milliseconds(alone),
        "with_a_long_program_behind_ms": milliseconds(looked),
        "blocking_with_a_long_program_behind_ms": milliseconds(blocked),
        "both_ms": milliseconds(ended),
        "lag_as_share_of_the_long_program": round(lag, 3),
        "lags": lag > 0.5,
    } | _outputs(bench)


def _outputs(bench: Bench) -> dict[str, Any]:
    """When the outputs of a program are ready, of which one is made first and the other late, from it."""

    def two(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = x / x.shape[0] ** 0.5
        early = late = jnp.dot(x, weight)
        for _ in range(16):
            late = jnp.dot(late, weight)
        return early, late

    program = jax.jit(two)
    jax.block_until_ready(program(bench.x))

    def once() -> list[float]:
        began = perf_counter()
        return seconds_until_ready(began, *program(bench.x))

    early, late = bench.median(once)
    return {
        "early_output_ms": milliseconds(early),
        "late_output_ms": milliseconds(late),
        "outputs_are_ready_together": early > 0.8 * late,
    }


def in_flight(bench: Bench) -> dict[str, Any]:
    """The first of many dispatches, all of the same program, that takes half as long as the program."""
    began = perf_counter()
    (length,) = seconds_until_ready(began, bench.short(bench.x))
    calls = []
    outputs = []
    for _ in range(48):
        began = perf_counter()
        outputs.append(bench.short(bench.x))
        calls.append(perf_counter() - began)
    jax.block_until_ready(outputs)
    slow = [i for i, seconds in enumerate(calls) if seconds > length / 2]
    return {
        "programs": len(calls),
        "program_ms": milliseconds(length),
        "first_dispatch_that_blocks": slow[0] if slow else None,
        "median_dispatch_us": round(1e6 * float(np.median(calls)), 1),
    }


def threads(bench: Bench) -> dict[str, Any]:
    """What happens behind a long program to work that another thread dispatches."""
    host = np.ones(2**18 if bench.large < 2**24 else 2**24, np.float32)
    device = jax.local_devices()[0]
    with ThreadPoolExecutor(1) as other:

        def behind(action: Callable[[], float]) -> list[float]:
            """Seconds of an action alone, then begun on another thread while a long program runs; its end."""
            alone = other.submit(action).result()
            began = perf_counter()
            running = bench.long(bench.x)
            took = other.submit(action).result()
            running.block_until_ready()
            return [alone, took, perf_counter() - began]

        def compute() -> float:
            return seconds_until_ready(perf_counter(), bench.short(bench.x))[0]

        def put() -> float:
            return seconds_until_ready(perf_counter(), jax.device_put(host, device))[0]

        ready = [jnp.full(host.shape, float(i)) for i in range(2 * bench.rounds)]
        jax.block_until_ready(ready)

        def get() -> float:
            began = perf_counter()
            np.asarray(ready.pop())
            return perf_counter() - began

        found: dict[str, Any] = {}
        for name, action in {"program": compute, "put": put, "get": get}.items():
            alone, took, long = bench.median(lambda action=action: behind(action))  # type: ignore[misc]
            found[name] = {
                "alone_ms": milliseconds(alone),
                "behind_a_long_program_ms": milliseconds(took),
                "long_program_ms": milliseconds(long),
                "waits_for_it": took - alone > 0.5 * (long - alone),
            }
    return found | {"an_input_on_its_way": _input_on_its_way(bench, device)}


def _input_on_its_way(bench: Bench, device: jax.Device) -> dict[str, Any]:
    """A program that reads an array still being copied to the device, and an independent one behind it."""
    host = np.ones(bench.large // 4, np.float32)
    read = jax.jit(lambda x: x[:8] * 2)
    jax.block_until_ready(read(jax.device_put(host, device)))

    def once() -> list[float]:
        (alone,) = seconds_until_ready(perf_counter(), bench.short(bench.x))
        began = perf_counter()
        array = jax.device_put(host, device)
        called = perf_counter() - began
        reader, later = read(array), bench.short(bench.x)
        return [alone, called, *seconds_until_ready(began, array, reader, later)]

    alone, called, put, reader, later = bench.median(once)
    return {
        "bytes": bench.large,
        "put_call_returns_ms": milliseconds(called),
        "put_ready_ms": milliseconds(put),
        "reader_ready_ms": milliseconds(reader),
        "later_program_alone_ms": milliseconds(alone),
        "later_program_ready_ms": milliseconds(later),
        "later_program_waits": later > max(put, called + 1.5 * alone),
    }


def copies(sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Seconds and bytes per second of copies by `device_put` and back, by size."""
    device, *others = jax.local_devices()
    copy = jax.jit(jnp.copy)
    found: dict[str, Any] = {}
    for name, size in sizes.items():
        host = np.random.default_rng(0).random(size // 4, np.float32)
        array = jax.block_until_ready(jax.device_put(host, device))
        fresh = [copy(array) for _ in range(rounds + 1)]
        jax.block_until_ready(fresh)
        times = {
            "host_to_device": median_seconds(lambda host=host: jax.device_put(host, device), rounds),  # type: ignore[misc]
            "device_to_host": median_seconds(lambda fresh=fresh: np.asarray(fresh.pop()), rounds),  # type: ignore[misc]
            "on_the_device": median_seconds(lambda array=array: copy(array), rounds),  # type: ignore[misc]
        }
        if others:
            times["to_another_device"] = median_seconds(
                lambda array=array: jax.device_put(array, others[0]),  # type: ignore[misc]
                rounds,
            )
        found[name] = {way: _speed(size, seconds) for way, seconds in times.items()}
    if not others:
        found["to_another_device"] = f"not measured: one {device.platform} device here"
    return found


def _speed(size: int, seconds: float) -> dict[str, float]:
    return {"us": round(1e6 * seconds, 1), "GB_per_s": round(size / seconds / 1e9, 3)}


def measure(found: Findings) -> None:
    quick, sizes = found.quick, QUICK_SIZES if found.quick else SIZES
    bench = Bench.of(quick)
    with found.section("readiness") as figures:
        figures.update(readiness(bench))
        found.headline = f"is_ready lags: {'yes' if figures['lags'] else 'no'}"
    with found.section("in_flight") as figures:
        figures.update(in_flight(bench))
    with found.section("threads") as figures:
        figures.update(threads(bench))
    with found.section("copies") as figures:
        figures.update(copies(sizes, bench.rounds))
    with found.section("two_processes") as figures:
        figures.update(on_ranks(2, pair, quick, seconds=found.seconds_left, env={}))
        overlap = figures["overlap"]["share_of_the_shorter_one_hidden"]
        found.headline += f"; of a pull, {overlap:.0%} overlaps with compute"
