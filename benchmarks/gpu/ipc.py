"""Can a process read another one's device memory without the host in between? By CUDA IPC, tried in two ways.

    jax    the memory of a JAX array itself: whether it can be shared depends on JAX's allocator
    own    memory that we allocate, to which the sender copies first: works where CUDA IPC does at all

The receiver copies into an array of its own and compares it with what was sent. Not measured: the message
that tells the receiver that the data is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.cuda import CudaError, Driver

LIMIT_SECONDS = 40.0


def measure(sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Share memory in both ways, have another process read it, and tell what came of it."""
    driver = Driver(jax.local_devices()[0].local_hardware_id)
    largest = max(sizes.values())
    array = jax.block_until_ready(jnp.arange(largest // 4, dtype=jnp.uint32))
    address: int = array.unsafe_buffer_pointer()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {}
    offers: dict[str, Any] = {}
    for name in ("jax", "own"):
        try:
            own = address if name == "jax" else _copy_of(driver, address, largest)
            base, _ = driver.allocation(own)
            offers[name] = {"handle": driver.share(base).hex(), "offset": own - base}
        except CudaError as error:
            found[name] = {"shared": False, "reason": str(error)}
    if offers:
        request = {"offers": offers, "sizes": sizes, "rounds": rounds}
        found |= _in_another_process(request)
    return found


def _copy_of(driver: Driver, address: int, size: int) -> int:
    """The address of fresh memory with the same content."""
    fresh = driver.allocate(size)
    driver.copy(fresh, address, size)
    return fresh


def _in_another_process(request: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.ipc"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that opens shared memory ended with {done.returncode}, see the log")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """In the other process: open what was shared, copy from it, compare."""
    driver = Driver()
    found = {}
    for name, offer in request["offers"].items():
        try:
            began = perf_counter()
            source = driver.open(bytes.fromhex(offer["handle"])) + offer["offset"]
            figures: dict[str, Any] = {"shared": True, "open_ms": round(1e3 * (perf_counter() - began), 3)}
            for size_name, size in request["sizes"].items():
                figures[size_name] = _copied(driver, source, size, request["rounds"])
        except CudaError as error:
            figures = {"shared": False, "reason": str(error)}
        found[name] = figures
    return found


def _copied(driver: Driver, source: int, size: int, rounds: int) -> dict[str, Any]:
    array = jax.block_until_ready(jnp.zeros(size // 4, jnp.uint32))
    samples = []
    for _ in range(rounds + 1):
        began = perf_counter()
        driver.copy(array.unsafe_buffer_pointer(), source, size)
        samples.append(perf_counter() - began)
    seconds = float(np.median(samples[1:]))
    right = bool(np.array_equal(np.asarray(array), np.arange(size // 4, dtype=np.uint32)))
    return {"us": round(1e6 * seconds, 1), "GB_per_s": round(size / seconds / 1e9, 3), "right": right}


if __name__ == "__main__":
    print(json.dumps(receive(json.load(sys.stdin))))
