"""Where the arrays of a message lie in its slots. Both ends work it out alike.

The copies out of slots that are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.runtime.transport.nixl.agent import LOOPBACK, NETWORKS, Agent, Memory
from rrfp_jax.runtime.transport.protocol import Specs


class Copies:
    """Programs that read slots, by the place that each empties."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[Sequence[jax.Array], float]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def since(self) -> float:
        """When the latest began (s)."""
        return max(began for _, began in self._under_way.values())

    def begin(self, place: int, tokens: Sequence[jax.Array]) -> None:
        """A place is being emptied; that has ended when all of these are ready."""
        self._under_way[place] = tokens, perf_counter()

    def ended(self) -> list[int]:
        """The places that have been emptied since the last call."""
        found = [place for place, (tokens, _) in self._under_way.items() if all(map(_is_ready, tokens))]
        for place in found:
            del self._under_way[place]
        return found


def _is_ready(array: jax.Array) -> bool:
    return bool(array.is_ready())  # type: ignore[attr-defined]


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


MOST = 64
"""Stretches that stay registered, of those which nothing is written from."""

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
KEEPS_ITS_MEMORY = ("", "default", "bfc")


class Sources:
    """What messages are written from.

    Args:
        agent: of this process.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        own_pool = ENVIRONMENT.get(ALLOCATOR, "") in KEEPS_ITS_MEMORY
        nothing_is_pinned = agent.here and ENVIRONMENT.get(NETWORKS) == LOOPBACK
        self._keeps = own_pool if agent.on_devices else nothing_is_pinned
        self._idle: dict[Memory, None] = {}  # registered, the oldest first

    def take(self, memory: Sequence[Memory]) -> None:
        """Something is going to be written from here.

        Raises:
            WriteFailed: the memory cannot be registered.
        """
        memory = list(dict.fromkeys(memory))
        new = [each for each in memory if each not in self._idle]
        for each in new:
            self._let_go([old for old in self._idle if _overlap(old, each)])  # it is not there any more
        if new:
            self._agent.register(new)
        for each in memory:
            self._idle.pop(each, None)

    def leave(self, memory: Sequence[Memory]) -> None:
        """It has been written, once for each `take`."""
        memory = list(dict.fromkeys(memory))
        again = [each for each in memory if not self._keeps or each in self._idle]
        if again:
            self._agent.release(again)
        if self._keeps:
            self._idle.update(dict.fromkeys(memory))
            self._let_go(list(self._idle)[: max(len(self._idle) - MOST, 0)])

    def _let_go(self, idle: Sequence[Memory]) -> None:
        if idle:
            self._agent.release(idle)
        for each in idle:
            del self._idle[each]


def _overlap(one: Memory, other: Memory) -> bool:
    apart = one.address + one.size <= other.address or other.address + other.size <= one.address
    return one.device == other.device and not apart


Cut: TypeAlias = tuple[int, tuple[int, ...], str]
"""Where an array begins in its slot, its shape, and its dtype's name."""

Program: TypeAlias = Callable[[jax.Array], Any]

OneArrayCompiler: TypeAlias = Callable[[jax.Device, Callable[..., Any], jax.ShapeDtypeStruct], Program]
"""What compiles a function of one array of this shape and dtype for a device."""


def by_jit(device: jax.Device, function: Callable[..., Any], spec: jax.ShapeDtypeStruct) -> Program:
    """Compiled when it is called first, and kept nowhere."""
    return jax.jit(function)


class Copiers:
    """Programs from a slot to the arrays in it; the last output of each is ready when it has ended.

    That one is nobody else's: the others may be donated to the program that takes them.

    Args:
        compiler: makes them.
    """

    def __init__(self, compiler: OneArrayCompiler) -> None:
        self._compiler = compiler
        self._made: dict[tuple[jax.Device, int, tuple[Cut, ...]], Program] = {}

    def of(self, device: jax.Device, size: int, cuts: tuple[Cut, ...]) -> Program:
        """The one that makes these cuts from a slot of so many bytes on a device."""
        key = device, size, cuts
        if (made := self._made.get(key)) is None:
            spec = jax.ShapeDtypeStruct((size,), np.uint8)
            made = self._made[key] = self._compiler(device, _copy_of(cuts), spec)
        return made


def _copy_of(cuts: tuple[Cut, ...]) -> Callable[[jax.Array], list[jax.Array]]:
    def copy(slot: jax.Array) -> list[jax.Array]:
        return [*(_array(slot, *cut) for cut in cuts), slot[0]]

    return copy


def _array(slot: jax.Array, offset: int, shape: tuple[int, ...], name: str) -> jax.Array:
    dtype = jnp.dtype(name)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = slot[offset : offset + size]
    if jnp.issubdtype(dtype, jnp.bool_):
        return (raw != 0).reshape(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _cast(raw, np.finfo(dtype).dtype).reshape(*shape, 2)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    info: Any = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    if info(dtype).bits < 8:  # kept one in a byte
        raw = raw.astype(f"uint{info(dtype).bits}")
    return _cast(raw, dtype).reshape(shape)


def _cast(raw: jax.Array, dtype: Any) -> jax.Array:
    width = dtype.itemsize
    return jax.lax.bitcast_convert_type(raw if width == 1 else raw.reshape(-1, width), dtype)
