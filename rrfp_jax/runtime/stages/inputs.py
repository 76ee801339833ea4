"""The data of a step's microbatches, on the devices whose programs read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.buckets import Bucket
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.library import StagePrograms
from rrfp_jax.runtime.programs.programs import VirtualStagePrograms
from rrfp_jax.runtime.sizes import as_sent

Load: TypeAlias = Callable[[Sequence[frozenset[str]]], Sequence[Mapping[str, Any]]]
"""The fields wanted of each microbatch -> their arrays by name."""


class Inputs:
    """Loads what the stage replicas of this process read.

    Args:
        layout: where they are.
        seed: of the run, which random keys depend on.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout, self._seed = layout, seed

    def reads(self, bucket: Bucket, microbatch: int, programs: StagePrograms) -> frozenset[str]:
        """The names of the fields of a microbatch that any program here reads; none of another replica's."""
        used = _read_by([own for number in self._that_see(microbatch) for own in programs[number]])
        return frozenset(name for i, (name, _, _) in enumerate(bucket) if i in used)

    def load(
        self, step: int, buckets: Sequence[Bucket], programs: Sequence[StagePrograms], load: Load
    ) -> dict[int, list[list[jax.Array | None]]]:
        """Per stage replica and microbatch of its replica, the inputs that its programs read: fields, then
        numbers.

        Args:
            step: its number.
            buckets, programs: of each microbatch.
            load: asked once, for all microbatches.
        """
        arrived: dict[int, list[list[jax.Array | None]]] = {
            number: [] for number in self._layout.stage_meshes
        }
        wanted = [self.reads(bucket, j, programs[j]) for j, bucket in enumerate(buckets)]
        for j, arrays in enumerate(load(wanted)):
            names = [name for name, _, _ in buckets[j]]
            given = {name: as_sent(array) for name, array in arrays.items()}
            values = [*(given.get(name) for name in names), np.array([self._seed, step, j], IDS.dtype)]
            for number in self._that_see(j):
                used = sorted(_read_by(programs[j][number]))
                there = self._layout.stage_meshes[number].put_whole([values[i] for i in used])
                placed = dict(zip(used, there, strict=True))
                arrived[number].append([placed.get(i) for i in range(len(values))])
        return arrived

    def _that_see(self, microbatch: int) -> list[int]:
        """The stage replicas of this process that see a microbatch."""
        return self._layout.stages_of(microbatch % self._layout.replicas)


def _read_by(virtual_stages: Sequence[VirtualStagePrograms]) -> Set[int]:
    """Indices of the inputs that any of their programs reads."""
    return {index for own in virtual_stages for index in own.inputs}
