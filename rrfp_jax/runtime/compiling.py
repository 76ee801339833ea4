"""Compiling ahead of time for one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.sharding import SingleDeviceSharding

from rrfp_jax.runtime.executables import Executables

Compiled: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Compiler:
    """Compiles for one device.

    Attributes:
        device: on which arguments and results are.
        executables: where compiled programs are kept.
    """

    device: jax.Device
    executables: Executables = field(default_factory=Executables)

    def __call__(self, function: Callable[..., Any], *specs: Any, donate: tuple[int, ...] = ()) -> Compiled:
        """The function compiled for arguments of these specs (trees of them).

        Args:
            function: to be traced.
            *specs: of its arguments.
            donate: indices of the arguments whose memory the results may take.
        """
        where = SingleDeviceSharding(self.device)
        placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), specs)
        program = jax.jit(function, donate_argnums=donate, keep_unused=True, out_shardings=where)
        return self.executables.compiled(program.lower(*placed), self.device)


def nbytes(spec: Any) -> int:
    """Bytes of an array or spec."""
    return int(spec.size) * int(spec.dtype.itemsize)


def temporary_bytes(compiled: Any) -> int:
    """Bytes that a compiled program needs while it runs, besides arguments and results; 0 if unknown."""
    analysis = compiled.memory_analysis() if compiled is not None else None
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
