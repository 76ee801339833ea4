"""The data of a step's microbatches, on the devices whose programs read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

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


class _Reading(NamedTuple):
    """What is read here of a microbatch.

    Attributes:
        fields: the names of those that any program here reads; none of another replica's.
        names: of all its fields.
        used: by stage replica of this process that sees it, the indices of what its programs read: of fields,
            then of numbers.
    """

    fields: frozenset[str]
    names: Sequence[str]
    used: Mapping[int, Sequence[int]]


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
        return self._reading(bucket, microbatch, programs).fields

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
        known: dict[tuple[Bucket, int], _Reading] = {}  # equal for microbatches of a bucket and a replica
        alike = [(bucket, j % self._layout.replicas) for j, bucket in enumerate(buckets)]
        for j, own in enumerate(alike):
            if own not in known:
                known[own] = self._reading(buckets[j], j, programs[j])
        wanted = [known[own] for own in alike]
        for j, arrays in enumerate(load([reading.fields for reading in wanted])):
            given = {name: as_sent(array) for name, array in arrays.items()}
            numbers = np.array([self._seed, step, j], IDS.dtype)
            values = [*map(given.get, wanted[j].names), numbers]
            for number, used in wanted[j].used.items():
                there = self._layout.stage_meshes[number].put_whole([values[i] for i in used])
                placed: list[jax.Array | None] = [None] * len(values)
                for i, array in zip(used, there, strict=True):
                    placed[i] = array
                arrived[number].append(placed)
        return arrived

    def _reading(self, bucket: Bucket, microbatch: int, programs: StagePrograms) -> _Reading:
        seen_by = self._layout.stages_of(microbatch % self._layout.replicas)
        used = {number: sorted(_read_by(programs[number])) for number in seen_by}
        names, every = [name for name, _, _ in bucket], {i for own in used.values() for i in own}
        return _Reading(frozenset(name for i, name in enumerate(names) if i in every), names, used)


def _read_by(virtual_stages: Sequence[VirtualStagePrograms]) -> Set[int]:
    """Indices of the inputs that any of their programs reads."""
    return {index for own in virtual_stages for index in own.inputs}
