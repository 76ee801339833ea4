"""This machine's device as an accelerator: two rates, measured in a second or two."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.forecast.cost_analysis import program_cost
from rrfp_jax.forecast.devices import Accelerator
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.sizes import memory_limit

REPEATS = 15


def measured_accelerator(device: jax.Device) -> Accelerator:
    """The rates at which a device multiplies matrices and takes a softmax, as `program_cost` counts them.

    Of CPUs what counts is a core's own time, so that others who use the machine at the moment do not matter;
    XLA must have been told to use one thread, as the launchers tell it.
    """
    cpu = device.platform == "cpu"
    size, rows = (512, 1024) if cpu else (8192, 65536)
    half, single = (_product_rate(device, size, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    scores = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    moved = program_cost(jax.make_jaxpr(jax.nn.softmax)(scores)).bytes
    return Accelerator(
        name="measured",
        half=half,
        single=single,
        bytes_per_second=moved / _seconds(device, jax.nn.softmax, scores),
        memory=memory_limit(device),
        link="loopback",
        source=f"measured on {device.device_kind}",
        together=len(os.sched_getaffinity(0)) if cpu else None,
    )


def _product_rate(device: jax.Device, size: int, dtype: Any) -> float:
    """Operations per second."""
    spec = jax.ShapeDtypeStruct((size, size), dtype)
    return 2 * size**3 / _seconds(device, jnp.matmul, spec, spec)


def _seconds(device: jax.Device, function: Callable[..., Any], *specs: Any) -> float:
    """The lower quartile of a few runs."""
    clock = time.process_time if device.platform == "cpu" else time.perf_counter
    program = Compiler(StageMesh((device,)))(function, *specs)
    arguments = [jax.device_put(jnp.ones(spec.shape, spec.dtype), device) for spec in specs]
    taken = []
    for _ in range(REPEATS):
        began = clock()
        jax.block_until_ready(program(*arguments))
        taken.append(clock() - began)
    return sorted(taken)[REPEATS // 4]
