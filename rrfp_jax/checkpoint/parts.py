"""Arrays on the host, as far as a process has them: parts of equal shape, as shards are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

Place: TypeAlias = tuple[int, ...]
"""Of a part in the grid of all parts of an array."""


@dataclass(frozen=True)
class Parts:
    """Some of an array's parts. NumPy takes it for the array if it is all there in one part.

    Attributes:
        shape, dtype: of the whole array.
        part: the shape of each part.
        arrays: those that are here, by place.
    """

    shape: Sequence[int]
    dtype: np.dtype[Any]
    part: Sequence[int]
    arrays: Mapping[Place, np.ndarray[Any, Any]]

    @classmethod
    def whole(cls, array: np.ndarray[Any, Any]) -> Parts:
        """An array in one part."""
        return cls(array.shape, array.dtype, array.shape, {(0,) * array.ndim: array})

    @property
    def nbytes(self) -> int:
        """Of those that are here."""
        return sum(array.nbytes for array in self.arrays.values())

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """The part that these slices tell, as shardings tell it."""
        return self.arrays[place_of(index, self.part)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if tuple(self.part) != tuple(self.shape):
            raise ValueError(f"there are only parts {list(self.part)} of an array {list(self.shape)}")
        (array,) = self.arrays.values()
        return np.array(array, dtype, copy=copy)


def place_of(index: Iterable[slice], part: Sequence[int]) -> Place:
    """Where the part is that these slices of an array tell."""
    return tuple((own.start or 0) // max(size, 1) for own, size in zip(index, part, strict=True))


def slices_of(place: Place, part: Sequence[int]) -> tuple[slice, ...]:
    """The part at a place as slices of the array."""
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, part, strict=True))


def file_of(place: Place) -> str:
    """The name of a part's file, as zarr has it."""
    return ".".join(map(str, place)) or "0"


def places_here(spec: Any) -> list[Place]:
    """Of the parts that this process's devices have of an array or spec with a sharding; each once."""
    part = spec.sharding.shard_shape(spec.shape)
    found = spec.sharding.addressable_devices_indices_map(spec.shape).values()
    return list(dict.fromkeys(place_of(index, part) for index in found))


def shards_to_write(array: jax.Array) -> dict[Place, jax.Array]:
    """Of all processes' shards of an array, this one's share: every place is in one of them."""
    part = array.sharding.shard_shape(array.shape)
    own = (shard for shard in array.addressable_shards if shard.replica_id == 0)
    return {place_of(shard.index, part): shard.data for shard in own}
