"""Checkpoints as the first versions wrote them: zarr 2, with a CRC-32 of every file in `rrfp.json`.

They are read, and no longer written. Their leaves have `files`, which those of today do not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rrfp_jax.checkpoint.leaves import folder_name, name_of
from rrfp_jax.checkpoint.parts import Parts, Place, file_of
from rrfp_jax.checkpoint.small_files import LARGEST_SMALL_FILE, read_file, read_small

if TYPE_CHECKING:
    from rrfp_jax.checkpoint.manifest import LeafRecord

HEADER = ".zarray"


def wrong_file(leaf: LeafRecord, part_bytes: int) -> str:
    """A file that a leaf cannot have, or that there are too many or too few, as the end of a sentence."""
    count = 1 + math.prod(leaf.grid)
    if count != len(leaf.files):  # before all places are counted up
        return f"has {len(leaf.files)} files instead of {count}"
    folder = folder_name(name_of(leaf.key))
    header, parts = f"{folder}/{HEADER}", {f"{folder}/{file_of(place)}" for place in leaf.places}
    for path, (size, _) in leaf.files.items():
        fits = size <= LARGEST_SMALL_FILE if path == header else path in parts and size == part_bytes
        if not fits:
            return f"has a file {path!r} of {size} bytes"
    return ""


def read_leaf(folder: Path, leaf: LeafRecord, part: Sequence[int], places: Sequence[Place]) -> Parts:
    """Of an array some parts, however it was cut when it was written.

    Raises:
        Damaged: a file is missing, too short or long, or has other bytes.
    """
    shape, dtype, name = leaf.shape, np.dtype(leaf.dtype), folder_name(name_of(leaf.key))
    found = {place: np.empty(part, dtype) for place in places}
    read_small(folder / f"{name}/{HEADER}", leaf.files[f"{name}/{HEADER}"])
    for there in leaf.places:
        cuts = {place: _overlap(place, part, there, leaf.stored_part) for place in places}
        if any(cuts.values()) or not shape:
            array = np.empty(leaf.stored_part, dtype)
            path = f"{name}/{file_of(there)}"
            read_file(folder / path, leaf.files[path][1], array.reshape(-1).view(np.uint8).data)
            for place, cut in cuts.items():
                if cut is not None:
                    found[place][cut[0]] = array[cut[1]]
    return Parts(shape, dtype, part, found)


def _overlap(
    place: Place, part: Sequence[int], other: Place, size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two parts have in common, of different cuts of one array: slices of either; None for nothing."""
    ours, theirs = [], []
    for i, n, j, m in zip(place, part, other, size, strict=True):
        begin, end = max(i * n, j * m), min((i + 1) * n, (j + 1) * m)
        if begin >= end:
            return None
        ours.append(slice(begin - i * n, end - i * n))
        theirs.append(slice(begin - j * m, end - j * m))
    return tuple(ours), tuple(theirs)
