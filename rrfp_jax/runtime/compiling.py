"""Compiling ahead of time for one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.sharding import SingleDeviceSharding

Compiled: TypeAlias = Callable[..., Any]


def compile_for(
    device: jax.Device, function: Callable[..., Any], *specs: Any, donate: tuple[int, ...] = ()
) -> Compiled:
    """The function compiled for arguments of these specs (trees of them) on a device.

    Args:
        device: on which arguments and results are.
        function: to be traced.
        *specs: of its arguments.
        donate: indices of the arguments whose memory the results may take.
    """
    where = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), specs)
    return jax.jit(function, donate_argnums=donate, out_shardings=where).lower(*placed).compile()


def nbytes(spec: Any) -> int:
    """Bytes of an array or spec."""
    return int(spec.size) * int(spec.dtype.itemsize)


def temporary_bytes(compiled: Any) -> int:
    """Bytes that a compiled program needs while it runs, besides arguments and results; 0 if unknown."""
    analysis = compiled.memory_analysis() if compiled is not None else None
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
