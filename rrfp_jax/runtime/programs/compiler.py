"""Compiling ahead of time for a stage's devices."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import PartitionSpec

from rrfp_jax.errors import UsageError
from rrfp_jax.progress import Doing, Progress
from rrfp_jax.runtime._jax import adopt, settings_here
from rrfp_jax.runtime.mesh.stage_mesh import AXES, StageMesh
from rrfp_jax.runtime.programs.equality import traced_key
from rrfp_jax.runtime.programs.executables import Effort, Executables

Compiled: TypeAlias = Callable[..., Any]

Job: TypeAlias = tuple[Any, int, Any]
"""A bucket, a stage replica, and the kind of a segment."""


def each_once(programs: Iterable[Compiled]) -> list[Compiled]:
    """Of programs that may share some, each once, in their order."""
    return [*{id(one): one for one in programs}.values()]


@contextmanager
def counting(
    progress: Progress, jobs: Iterable[Job], parts: str, compiles: Callable[[], int]
) -> Iterator[Callable[[Job], None]]:
    """Tells of kinds of segments while several threads compile them.

    Gives what is called when a kind has all its programs on a stage. `compiles` counts what is not loaded.
    """
    left = Counter((bucket, kind) for bucket, _, kind in jobs)  # on how many stages
    buckets, total, before = len({bucket for bucket, _ in left}), len(left), compiles()
    lock = threading.Lock()  # a listener is called by one thread at a time

    def tell(failed: bool = False) -> None:
        current = min(buckets - len({bucket for bucket, _ in left}) + 1, buckets)
        detail = f"bucket {current} of {buckets}" if buckets > 1 else ""
        if not (left or failed) and compiles() == before:
            detail = "all loaded"
        progress(Doing("compiling", total - len(left), total, detail, parts))

    def ended(job: Job) -> None:
        bucket, _, kind = job
        with lock:
            left[bucket, kind] -= 1
            if not left[bucket, kind]:
                del left[bucket, kind]
                tell()

    if total:
        tell()
    try:
        yield ended
    finally:
        with lock:
            if left:  # an error: it ends here
                left.clear()
                tell(failed=True)


IS_DROPPED: ContextVar[Callable[[], bool]] = ContextVar("IS_DROPPED", default=lambda: False)
"""By thread: whether nobody wants any more what is compiled there, and by the pools that it makes."""


class NoLongerWanted(Exception):
    """A program that nobody wants any more was not begun."""


@dataclass(frozen=True)
class Compiler:
    """Compiles for one stage's devices."""

    stage_mesh: StageMesh
    executables: Executables = field(default_factory=Executables)

    def __call__(
        self,
        function: Callable[..., Any],
        *specs: Any,
        out: Any = (),
        donate: tuple[int, ...] = (),
        effort: Effort = "steps",
    ) -> Compiled:
        """The function compiled for arguments of these specs (trees of them).

        Args:
            function: to be traced.
            *specs: of its arguments; without a sharding, an argument is whole on every device.
            out: shardings of its results, a tree like them, in which None leaves the choice to the compiler;
                unless it is given all are whole.
            donate: indices of the arguments whose memory the results may take.
            effort: what pays when it is compiled for CPUs, see `CPU_OPTIONS`.
        """
        if IS_DROPPED.get()():
            raise NoLongerWanted
        stage_mesh = self.stage_mesh

        def placed(spec: Any) -> jax.ShapeDtypeStruct:  # host arrays have no sharding
            given = None if stage_mesh.single else getattr(spec, "sharding", None)
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=given or stage_mesh.whole)

        where = stage_mesh.whole if stage_mesh.single or out == () else out
        program = jax.jit(function, donate_argnums=donate, keep_unused=True, out_shardings=where)
        with stage_mesh.tracing():
            traced = program.trace(*jax.tree.map(placed, specs))
            key = traced_key(traced) if stage_mesh.single else None  # meshes of several are in the program
            return self.executables.compiled(traced, stage_mesh.devices, effort, key)


def compiled_for(
    executables: Executables, device: jax.Device, function: Callable[..., Any], *specs: Any
) -> Compiled:
    """A function compiled for one device of this process; see `Compiler`."""
    return Compiler(StageMesh((device,)), executables)(function, *specs)


def first_sum(compiler: Compiler) -> Callable[[], jax.Array]:
    """Begins a sum over all devices of a stage, which have found each other once it is ready; compiled."""
    stage_mesh = compiler.stage_mesh
    ones, spread = np.ones(len(stage_mesh.devices), np.float32), stage_mesh.sharding(PartitionSpec(AXES))
    program = compiler(jnp.sum, jax.ShapeDtypeStruct(ones.shape, ones.dtype, sharding=spread))
    return lambda: program(stage_mesh.put(ones, spread))  # type: ignore[no-any-return]


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


PLUGINS = {"jax_plugins.xla_cuda12": "cuda12", "jax_plugins.xla_cuda13": "cuda13"}
"""Packages with a compiler for GPUs, and what of jax installs them."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # what is computed on the way is computed here
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # which asks the driver
}
"""Variables to be set before JAX is used."""


def require_gpu_compiler() -> None:
    """Refuse to go on without one."""
    if not any(is_there(name) for name in PLUGINS):
        choices = " or ".join(f"pip install 'jax[{extra}]=={jax.__version__}'" for extra in PLUGINS.values())
        raise UsageError(
            f"XLA's compiler for GPUs is not installed here; no GPU or driver is needed, but {choices} "
            f"(2.4 GB of packages; best into an environment of its own)"
        )


def absent_gpus(target: str, processes: int, each: int) -> list[Sequence[jax.Device]]:
    """GPUs by process, numbered as those of a run are; needs a compiler for them."""
    try:
        found = topologies.get_topology_desc(
            "absent", "cuda", target_config=target, topology=f"1x{processes}x{each}"
        ).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"JAX cannot describe GPUs that are not there: {reason}") from None
    devices: list[Any] = sorted(found, key=attrgetter("process_index", "id"))
    return [list(own) for _, own in groupby(devices, key=attrgetter("process_index"))]


def is_there(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
