"""How many bytes something takes: arrays, compiled programs, devices. Nobody else in the runtime measures.

`programs/stage_programs.py` counts by them what a microbatch takes. `stages/memory.py` counts what a stage
takes, and holds it against what there is.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import numpy as np


def nbytes(tree: Any) -> int:
    """Bytes of a tree of arrays or specs, on each device that has a part of them."""
    return sum(map(_nbytes, jax.tree.leaves(tree)))


def _nbytes(spec: Any) -> int:
    sharding = getattr(spec, "sharding", None)
    shape = spec.shape if sharding is None else sharding.shard_shape(spec.shape)
    return int(math.prod(shape) * spec.dtype.itemsize)


def on_the_way(spec: Any) -> Any:
    """The spec of an array as compiled programs expect it: numbers of 4 bits and less have a byte each."""
    dtype = _dtype_on_the_way(spec.dtype)
    return spec if dtype is None else jax.ShapeDtypeStruct(spec.shape, dtype)


def as_sent(array: Any) -> Any:
    """An array of the host as it is given to a stage."""
    dtype = _dtype_on_the_way(array.dtype)
    return array if dtype is None else np.asarray(array).astype(dtype)


@lru_cache(maxsize=128)
def _dtype_on_the_way(dtype: Any) -> Any:
    """None if it stays as it is; NumPy puts a dtype's name together at every look."""
    if not dtype.name.endswith(("int4", "int2")):
        return None
    return np.dtype(np.uint8 if dtype.name.startswith("u") else np.int8)


def temporary_bytes(compiled: Any) -> int:
    """Bytes that a compiled program needs while it runs, besides arguments and results; 0 if unknown."""
    analysis = compiled.memory_analysis() if compiled is not None else None
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that JAX may use on a device; None where it does not say, as on CPUs."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def in_words(count: int) -> str:
    """Bytes as messages tell them."""
    return f"{count:,} bytes" + (f" ({count / 2**20:.1f} MiB)" if count >= 2**20 else "")
