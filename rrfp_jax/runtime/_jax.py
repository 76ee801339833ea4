"""Every use of JAX internals, in one place. Tried on jax 0.10.2 (Python 3.11) and 0.12.0.1 (3.12)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
from jax._src import xla_bridge
from jax._src.interpreters import partial_eval
from jax.extend.core import ClosedJaxpr


def live_part(closed: ClosedJaxpr, outputs: Sequence[bool]) -> tuple[ClosedJaxpr, list[int]]:
    """The program reduced to the chosen outputs, and the indices of the inputs that it still reads.

    JAX's dead-code elimination looks into calls and loop bodies, which a walk over equations cannot.
    """
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(outputs))
    return ClosedJaxpr(jaxpr, closed.consts), [i for i, live in enumerate(used) if live]


def provide_cpu_devices(count: int) -> None:
    """Ask for `count` virtual CPU devices if JAX has no backend yet and nobody else has asked for some."""
    asked = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if xla_bridge.backends_are_initialized() or asked or jax.config.jax_num_cpu_devices > 0:
        return
    jax.config.update("jax_num_cpu_devices", count)
