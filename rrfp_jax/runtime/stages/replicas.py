"""Adds up the gradients of a stage's replicas, once at the end of a step.

The sums of all replicas, side by side, are one array over the mesh of all of them. Its sum over the first
axis is an all-reduce. A stage's replicas do so as soon as all have run their tasks, whatever other stages do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler

Arrays: TypeAlias = Sequence[jax.Array]


class Reduction:
    """Of one stage, in a process that has at least one of its replicas.

    Args:
        replicas: the compilers of this process's replicas, in their order.
        home: that of the devices of all replicas.
        sums: specs of the gradient sums.
        partition: how each is spread over a replica's devices.
    """

    def __init__(
        self,
        replicas: Sequence[Compiler],
        home: Compiler,
        sums: Sequence[Any],
        partition: Sequence[PartitionSpec],
    ) -> None:
        self._meshes, self._home = [compiler.stage_mesh for compiler in replicas], home.stage_mesh
        beside = [jax.ShapeDtypeStruct((home.stage_mesh.replicas, *s.shape), s.dtype) for s in sums]
        self._beside = home.stage_mesh.spread(beside, [PartitionSpec("dp", *spec) for spec in partition])
        alone = [jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for s in sums]
        self._lifts: list[Compiled] = []
        for compiler in replicas:
            own = compiler.stage_mesh.spread(sums, partition)
            out = compiler.stage_mesh.spread(alone, [PartitionSpec(None, *spec) for spec in partition])
            self._lifts.append(compiler(_lift, own, out=[s.sharding for s in out], donate=(0,)))
        where = [home.stage_mesh.sharding(spec) for spec in partition]
        self._add = home(_add, self._beside, out=where)

    def __call__(self, sums: Sequence[Arrays]) -> list[Arrays]:
        """The totals for each of this process's replicas, from its sums, which are donated."""
        lifted = [lift(list(own)) for lift, own in zip(self._lifts, sums, strict=True)]
        totals = self._add(together(self._home, self._meshes, lifted, self._beside))
        return apart(self._home, self._meshes, totals)


def together(
    home: StageMesh, stage_meshes: Sequence[StageMesh], arrays: Sequence[Arrays], specs: Sequence[Any]
) -> list[jax.Array]:
    """Arrays over the devices of all replicas, from what this process's replicas have of them."""
    shards = [stage_mesh.shards(own) for stage_mesh, own in zip(stage_meshes, arrays, strict=True)]
    counts = [len(stage_mesh.own) for stage_mesh in stage_meshes]
    beside = [
        shard
        for i in range(len(specs))
        for own, n in zip(shards, counts, strict=True)
        for shard in own[i * n : (i + 1) * n]
    ]
    return list(home.joined(beside, specs))


def apart(home: StageMesh, stage_meshes: Sequence[StageMesh], arrays: Arrays) -> list[Arrays]:
    """What each of this process's replicas has of arrays over all of them that are alike on each."""
    partition = [array.sharding.spec for array in arrays]  # type: ignore[attr-defined]
    shards, n, first, found = home.shards(arrays), len(home.own), 0, []
    for stage_mesh in stage_meshes:
        places = [i * n + first + k for i in range(len(arrays)) for k in range(len(stage_mesh.own))]
        specs = stage_mesh.spread(arrays, partition)
        found.append(stage_mesh.joined([shards[place] for place in places], specs))
        first += len(stage_mesh.own)
    return found


def _lift(sums: list[Any]) -> list[Any]:
    return [a[None] for a in sums]


def _add(sums: list[Any]) -> list[Any]:
    return [jnp.sum(a, axis=0) for a in sums]
