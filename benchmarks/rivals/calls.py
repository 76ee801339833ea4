"""What a call costs the host, its mesh entered with `jax.set_mesh`, as marin#6532 does, or named instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness import table

STAGES, CALLS, ROUNDS = 4, 128, 9
SIZES = ((1, 6), (8, 6), (8, 300))
"""Devices of a stage, and arrays that a call is given."""


def call_costs() -> list[dict[str, float]]:
    """Microseconds of a call for all sizes, of this process, whose devices are made here."""
    jax.config.update("jax_num_cpu_devices", STAGES * max(devices for devices, _ in SIZES))
    return [{"devices": own[0], "arrays": own[1], **costs(*own)} for own in SIZES]


def costs(devices: int, arrays: int) -> dict[str, float]:
    """Medians over rounds in which stages are called one after the other, as a pipeline's host calls them."""
    every = np.array(jax.devices()[: STAGES * devices]).reshape(STAGES, devices)
    meshes = [Mesh(own, ("data",)) for own in every]
    given = [_arrays(mesh, arrays) for mesh in meshes]
    naming = [jax.jit(partial(_stage, NamedSharding(mesh, P("data")))) for mesh in meshes]
    bare = jax.jit(partial(_stage, P("data")))  # one function for all stages: the mesh around it tells which

    def entered(stage: int) -> Any:
        with jax.set_mesh(meshes[stage]):
            return bare(*given[stage])

    def alone(stage: int) -> Any:
        with jax.set_mesh(meshes[stage]):
            return None

    ways: Mapping[str, Callable[[int], Any]] = {
        "entered": entered,
        "named": lambda stage: naming[stage](*given[stage]),
        "entering alone": alone,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + ROUNDS):  # the first compiles
        for name, call in ways.items():
            found[name].append(_microseconds(call))
    return {name: round(median(own[1:]), 1) for name, own in found.items()}


def _arrays(mesh: Mesh, count: int) -> tuple[list[jax.Array], jax.Array]:
    """So many parameters, each on all devices of a stage, and a carry that they share out."""
    whole, shared = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.device_put([np.ones(8, np.float32)] * (count - 1), whole)
    return params, jax.device_put(np.ones((8, 8), np.float32), shared)


def _stage(spec: Any, params: list[jax.Array], carry: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.with_sharding_constraint(carry * jnp.stack(params).sum(0), spec)
    return result


def _microseconds(call: Callable[[int], Any]) -> float:
    """Of a call until the host goes on, behind which nothing runs any more."""
    began = perf_counter()
    last = [call(i % STAGES) for i in range(CALLS)][-STAGES:]
    seconds = perf_counter() - began
    jax.block_until_ready(last)
    return 1e6 * seconds / CALLS


def calls_table(found: list[dict[str, float]]) -> str:
    """A row for each size."""
    heads = ["us a call: devices a stage", "arrays", "entered", "named", "entering alone"]
    return table(heads, [list(own.values()) for own in found])
