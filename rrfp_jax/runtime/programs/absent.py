"""Devices that are not there, for which programs can be compiled and serialised, but not run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from typing import Any

import jax
from jax.experimental import topologies

from rrfp_jax.errors import UsageError

PLUGINS = {"jax_plugins.xla_cuda12": "cuda12", "jax_plugins.xla_cuda13": "cuda13"}
"""Packages with a compiler for GPUs, and what of jax installs them."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # what is computed on the way is computed here
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # which asks the driver
}
"""Variables to be set before JAX is used."""


def require_gpu_compiler() -> None:
    """Refuse to go on without one.

    Raises:
        UsageError: naming the command that installs it.
    """
    if not any(is_there(name) for name in PLUGINS):
        choices = " or ".join(f"pip install 'jax[{extra}]=={jax.__version__}'" for extra in PLUGINS.values())
        raise UsageError(
            f"XLA's compiler for GPUs is not installed here; no GPU or driver is needed, but {choices} "
            f"(2.4 GB of packages; best into an environment of its own)"
        )


def absent_gpus(target: str, processes: int, each: int) -> list[Sequence[jax.Device]]:
    """GPUs by process, numbered as those of a run are.

    Args:
        target: what XLA must know of one; see `forecast/compiler_targets.py`.
        processes: that have them.
        each: how many each process has.

    Raises:
        UsageError: there is no compiler for GPUs, or JAX was in use already without `ENVIRONMENT`.
    """
    require_gpu_compiler()
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
