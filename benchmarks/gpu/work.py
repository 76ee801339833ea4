"""Programs that keep a device busy for a given time, and how to time what is dispatched ahead.

A program is a chain of matrix products, written out: a loop with a length known only at run time would make
the GPU's host thread wait for every round of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOOK_SECONDS = 2e-5
"""Between two looks at an array's readiness."""

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "256 MiB": 2**28}
QUICK_SIZES = {"4 KiB": 2**12, "1 MiB": 2**20}


def has_nvidia_gpu() -> bool:
    return jax.devices()[0].platform in ("gpu", "cuda")


@dataclass(frozen=True)
class Busy:
    """Makes programs of a given length on this process's first device.

    Attributes:
        matrix: random, so that the chain neither grows nor vanishes.
        seconds: that one product takes.
    """

    matrix: jax.Array
    seconds: float

    @classmethod
    def calibrated(cls, size: int, dtype: Any) -> Busy:
        """For products of `size` x `size` matrices; measures one."""
        key = jax.random.key(0)
        matrix = (jax.random.normal(key, (size, size)) / size**0.5).astype(dtype)
        chain = _chain(matrix, 8)
        return cls(matrix, median_seconds(lambda: chain(matrix), 5) / 8)

    def program(self, seconds: float) -> Callable[[jax.Array], jax.Array]:
        """A compiled program of about that length, at least one product; takes and gives a matrix."""
        return _chain(self.matrix, max(1, round(seconds / self.seconds)))

    @property
    def rate(self) -> float:
        """Floating-point operations per second in these products."""
        return float(2 * self.matrix.shape[0] ** 3 / self.seconds)


@dataclass(frozen=True)
class Bench:
    """A short and a long program, and how often things are done."""

    x: jax.Array
    short: Callable[[jax.Array], jax.Array]
    long: Callable[[jax.Array], jax.Array]
    rounds: int
    large: int  # bytes of a copy that takes a while

    @classmethod
    def of(cls, quick: bool) -> Bench:
        """Of a few and of some hundred milliseconds; shorter if quick."""
        busy = Busy.calibrated(256, jnp.float32) if quick else Busy.calibrated(8192, jnp.bfloat16)
        short, long = (0.002, 0.02) if quick else (0.005, 0.15)
        x = jax.random.normal(jax.random.key(1), busy.matrix.shape).astype(busy.matrix.dtype)
        bench = cls(x, busy.program(short), busy.program(long), 3 if quick else 7, 2**22 if quick else 2**30)
        jax.block_until_ready([bench.short(x), bench.long(x)])
        return bench

    def median(self, once: Callable[[], list[float]]) -> list[float]:
        """Medians of several rounds of the same measurements."""
        return [float(m) for m in np.median([once() for _ in range(self.rounds)], axis=0)]


def _chain(matrix: jax.Array, products: int) -> Callable[[jax.Array], jax.Array]:
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        for _ in range(products):
            x = jnp.dot(x, weight)
        return x

    compiled: Any = jax.jit(run).lower(matrix, matrix).compile()
    return lambda x: compiled(x, matrix)  # type: ignore[no-any-return]


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median seconds from a call to the end of what it dispatched, after one call that is not counted."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(rounds):
        began = perf_counter()
        jax.block_until_ready(call())
        samples.append(perf_counter() - began)
    return float(np.median(samples))


def seconds_until_ready(began: float, *arrays: jax.Array) -> list[float]:
    """Look at arrays until all are ready; the seconds since `began` at which each one first was."""
    found: dict[int, float] = {}
    while len(found) < len(arrays):
        for i, array in enumerate(arrays):
            if i not in found and array.is_ready():  # type: ignore[attr-defined]
                found[i] = perf_counter() - began
        sleep(LOOK_SECONDS)
    return [found[i] for i in range(len(arrays))]


def milliseconds(seconds: float) -> float:
    """For figures: rounded to a microsecond."""
    return round(1e3 * seconds, 3)
