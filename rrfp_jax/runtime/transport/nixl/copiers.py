"""The programs that copy messages out of slots, each compiled once: ahead, where a message is foreseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

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
