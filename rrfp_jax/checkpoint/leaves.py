"""Leaves of parameters and optimizer state: their names on whichever stage, and their parts on the host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable
from rrfp_jax.random_keys import as_key, is_key, plain, plain_spec

PARAMETERS, OPTIMIZER = "params", "optimizer"
"""What the keys of leaves begin with."""

LONGEST_NAME = 255
"""Bytes of a folder's name that file systems take."""

Key: TypeAlias = tuple[str, ...]
"""The way to a leaf, such as ("params", "3", "attention", "query") or ("optimizer", "0", "count").

A stage's parameters are a tree by layer, and an optimizer's state holds trees like it, so the layer is in the
key of whatever belongs to one: ("optimizer", "0", "mu", "3", "attention", "query"). What belongs to none,
such as a count of steps, has the same key on every stage, and the same value.
"""

Place: TypeAlias = tuple[int, ...]
"""Of a part in the grid of all parts of an array."""


Shards: TypeAlias = Mapping[Place, jax.Array]
"""Some parts of an array, on the devices."""

Forms: TypeAlias = dict[str, str]
"""See `forms_of`."""


def name_of(key: Key) -> str:
    """A key as messages have it: "params.3.attention.query"."""
    return ".".join(key)


def forms_of(leaves: Iterable[tuple[Key, Any]]) -> Forms:
    """Dtype and shape of arrays or specs by name, such as "float32[2, 3]"."""
    return {name_of(key): f"{spec.dtype.name}{list(spec.shape)}" for key, spec in leaves}


def folder_name(name: str) -> str:
    """The name of a leaf's folder, in which a slash is "%2F" and a percent sign "%25"."""
    return name.replace("%", "%25").replace("/", "%2F")


def keyed(tree: Any, *prefix: str) -> list[tuple[Key, Any]]:
    """The leaves of a tree of arrays or specs, with their keys; typed random keys as plain numbers.

    Raises:
        UsageError: two leaves have the same name, or one has a name that no folder can have.
    """
    found = [
        (_key(prefix, path), plain(leaf) if isinstance(leaf, jax.Array) else plain_spec(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    for name, count in Counter(name_of(key) for key, _ in found).items():
        if wrong := why_unstorable(name) or (f"is that of {count} leaves" if count > 1 else ""):
            raise UsageError(
                f"the name {printable(name)} {wrong}, so it cannot be stored: rename the parameter"
            )
    return found


def why_unstorable(name: str) -> str:
    """Why no folder can be named after a leaf, as the end of a sentence; empty if one can."""
    if name in ("", ".", ".."):
        return "is no name of a folder"
    if not name.isprintable():
        return "has a character that cannot be printed"
    length = len(os.fsencode(folder_name(name)))
    return f"has {length} bytes, of which a folder takes {LONGEST_NAME}" if length > LONGEST_NAME else ""


def filled(specs: Any, leaves: Mapping[Key, Any], *prefix: str) -> Any:
    """A tree like `specs` with the leaves of these keys; the inverse of `keyed`, but parts stay numbers."""

    def like(path: tuple[Any, ...], spec: Any) -> Any:
        leaf = leaves[_key(prefix, path)]
        stays = isinstance(leaf, Parts) or not is_key(spec)
        return leaf if stays else as_key(spec, jax.device_put(np.asarray(leaf)))

    return jax.tree_util.tree_map_with_path(like, specs)


def _key(prefix: Key, path: tuple[Any, ...]) -> Key:
    return (*prefix, *(jax.tree_util.keystr((entry,), simple=True) for entry in path))


@dataclass(frozen=True)
class Parts:
    """Some of an array's parts, of equal shape. NumPy takes it for the array if that is one part."""

    shape: Sequence[int]  # of the whole array
    dtype: np.dtype[Any]
    part: Sequence[int]  # the shape of each part
    arrays: Mapping[Place, np.ndarray[Any, Any]]  # those that are here

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


def shards_to_write(array: jax.Array) -> Shards:
    """Of all processes' shards of an array, this one's share: every place is in one of them."""
    part = array.sharding.shard_shape(array.shape)
    own = (shard for shard in array.addressable_shards if shard.replica_id == 0)
    return {place_of(shard.index, part): shard.data for shard in own}
