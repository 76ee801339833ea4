"""Compiling ahead of time for a stage's devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from rrfp_jax.runtime._jax import adopt, settings_here
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.stage_mesh import AXES, StageMesh

Compiled: TypeAlias = Callable[..., Any]

IS_DROPPED: ContextVar[Callable[[], bool]] = ContextVar("IS_DROPPED", default=lambda: False)
"""By thread: whether nobody wants any more what is compiled there, and by the pools that it makes."""


class Dropped(Exception):
    """A program that nobody wants any more was not begun."""


@dataclass(frozen=True)
class Compiler:
    """Compiles for one stage's devices.

    Attributes:
        stage_mesh: the devices.
        executables: where compiled programs are kept.
        made: called after each program.
    """

    stage_mesh: StageMesh
    executables: Executables = field(default_factory=Executables)
    made: Callable[[], None] = lambda: None

    def __call__(
        self,
        function: Callable[..., Any],
        *specs: Any,
        out: Any = (),
        donate: tuple[int, ...] = (),
        roughly: bool = False,
    ) -> Compiled:
        """The function compiled for arguments of these specs (trees of them).

        Args:
            function: to be traced.
            *specs: of its arguments; without a sharding, an argument is whole on every device.
            out: shardings of its results, a tree like them, in which None leaves the choice to the compiler;
                unless it is given all are whole.
            donate: indices of the arguments whose memory the results may take.
            roughly: whether it runs once and computes little, so that compiling it well takes longer.

        Raises:
            Dropped: nobody wants it any more.
        """
        if IS_DROPPED.get()():
            raise Dropped
        stage_mesh = self.stage_mesh

        def placed(spec: Any) -> jax.ShapeDtypeStruct:  # host arrays have no sharding
            given = None if stage_mesh.single else getattr(spec, "sharding", None)
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=given or stage_mesh.whole)

        where = stage_mesh.whole if stage_mesh.single or out == () else out
        program = jax.jit(function, donate_argnums=donate, keep_unused=True, out_shardings=where)
        with stage_mesh.tracing():
            lowered = program.lower(*jax.tree.map(placed, specs))
        compiled = self.executables.compiled(lowered, stage_mesh.devices, roughly)
        self.made()
        return compiled


def compiled_for(
    executables: Executables, device: jax.Device, function: Callable[..., Any], *specs: Any
) -> Compiled:
    """A function compiled for one device of this process; see `Compiler`."""
    return Compiler(StageMesh((device,)), executables)(function, *specs)


@dataclass(frozen=True)
class FirstSum:
    """A sum over all devices of a stage, which have found each other once it is ready."""

    compiler: Compiler

    @cached_property
    def program(self) -> Compiled:
        """Compiled; a number of each device -> their sum."""
        spec = jax.ShapeDtypeStruct((len(self._stage_mesh.devices),), np.float32, sharding=self._spread)
        return self.compiler(jnp.sum, spec)

    def __call__(self) -> jax.Array:
        """Begin it."""
        ones = np.ones(len(self._stage_mesh.devices), np.float32)
        total: jax.Array = self.program(self._stage_mesh.put(ones, self._spread))
        return total

    @property
    def _stage_mesh(self) -> StageMesh:
        return self.compiler.stage_mesh

    @property
    def _spread(self) -> Sharding:
        return self._stage_mesh.sharding(PartitionSpec(AXES))


def results(compiled: Any, stage_mesh: StageMesh) -> list[Any]:
    """The shardings of the list of arrays that a program gives, as the compiler has chosen them.

    They are on this stage's devices, though the program may be an equal one of another stage's.
    """
    own = [] if compiled is None else jax.tree.leaves(compiled.output_shardings)
    return list(map(stage_mesh.like, own))


@contextmanager
def compile_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for compiling, which XLA does outside the interpreter lock; an error drops what waits.

    There are twice as many as processors: one that waits for an equal program keeps none of them busy, and
    `Executables` lets no more compile at once than there are processors. Layers are traced there, too, so
    JAX's settings on this thread hold there; and what is dropped here is dropped there.
    """
    settings, is_dropped = settings_here(), IS_DROPPED.get()

    def begin() -> None:
        adopt(settings)
        IS_DROPPED.set(is_dropped)

    pool = ThreadPoolExecutor(2 * (os.cpu_count() or 1), initializer=begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
