"""Where the arrays of a message lie in its slots. Both ends work it out alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import jax.numpy as jnp

from rrfp_jax.runtime.transport.nixl.copiers import Cut
from rrfp_jax.runtime.transport.protocol import Specs

ALIGNMENT = 256
"""Bytes: what GPUs align allocations to, and more than any dtype needs."""


class Part(NamedTuple):
    """Where one array lies: on which of the stage's devices, from which byte of its slot, how many."""

    device: int
    offset: int
    size: int


class Packing(NamedTuple):
    """Where all arrays of a message lie, and how many bytes of each device's slot that takes."""

    parts: Sequence[Part]
    size: int


@lru_cache(maxsize=1024)
def packed(specs: Specs, devices: int) -> Packing:
    """Lay out arrays, which go to the receiving stage's devices in turn, one after another on each.

    Args:
        specs: of the arrays.
        devices: of the receiving stage, how many.

    Raises:
        TypeError, ValueError: of a dtype or shape that there is not.
    """
    if any(length < 0 for shape, _ in specs for length in shape):
        raise ValueError("an array of negative length")
    parts, used = [], [0] * devices
    for i, (shape, dtype) in enumerate(specs):
        at, size = i % devices, prod(shape) * jnp.dtype(dtype).itemsize
        parts.append(Part(at, used[at], size))
        used[at] += -(-size // ALIGNMENT) * ALIGNMENT
    return Packing(parts, max(used))


@lru_cache(maxsize=1024)
def cuts_of(specs: Specs, devices: int) -> Sequence[tuple[Sequence[int], tuple[Cut, ...]]]:
    """By device of a stage, which of a message's arrays lie in its slot, and where."""
    parts = packed(specs, devices).parts
    own = [[i for i, part in enumerate(parts) if part.device == device] for device in range(devices)]
    return [(which, tuple((parts[i].offset, *specs[i]) for i in which)) for which in own]
