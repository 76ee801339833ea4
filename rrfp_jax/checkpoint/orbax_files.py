"""A checkpoint's files as orbax has them: each array a folder in zarr's form, their tree in `_METADATA`.

Orbax itself cannot write them here: under `jax.distributed` it refuses arrays that live in one process. It
reads them without this project: `orbax.checkpoint.StandardCheckpointer().restore(path)`. The forms are those
of https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html and of
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html with `use_ocdbt=False`: there
no file holds leaves of two processes, so nothing is merged. An array is stored as it lies on the devices: a
chunk, in a file of its own, for each shard.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rrfp_jax.checkpoint.leaves import Key, folder_name, name_of
from rrfp_jax.checkpoint.manifest import HEADER, Leaf, Written, file_of
from rrfp_jax.checkpoint.parts import Parts, Place
from rrfp_jax.files import opened


class Damaged(Exception):
    """A file is not what was written; the message names it."""


def write_leaf(folder: Path, key: Key, leaf: Parts) -> Leaf:
    """Write this process's parts of an array below a checkpoint's folder, a file each.

    Raises:
        OSError: they cannot be written.
    """
    name, dtype = folder_name(name_of(key)), leaf.dtype
    (folder / name).mkdir(exist_ok=True)
    header = {
        "chunks": [max(1, n) for n in leaf.part],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": dtype.name if dtype.kind == "V" else dtype.str,  # "bfloat16" or "<f4"
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(leaf.shape),
        "zarr_format": 2,
    }
    contents: dict[str, bytes | memoryview] = {f"{name}/{HEADER}": json.dumps(header).encode()}
    for place, array in leaf.arrays.items():
        if array.size:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            contents[f"{name}/{file_of(place)}"] = data
    return Leaf(
        key=key,
        shape=tuple(leaf.shape),
        part=tuple(leaf.part),
        dtype=dtype.name,
        files={path: write_file(folder / path, content) for path, content in contents.items()},
    )


def read_leaf(
    folder: Path, leaf: Leaf, part: Sequence[int] | None = None, places: Sequence[Place] | None = None
) -> Parts:
    """Of an array that `write_leaf` has written, some parts, however it was cut when it was written.

    Args:
        folder: of the checkpoint.
        leaf: what all processes' `write_leaf` returned, `joined`.
        part: the shape of each part; None for the whole array.
        places: of those that are wanted; None for the first, which may be all that there is.

    Raises:
        Damaged: a file is missing, too short or long, or has other bytes.
    """
    shape, dtype, name = leaf.shape, np.dtype(leaf.dtype), folder_name(name_of(leaf.key))
    part = shape if part is None else part
    places = [(0,) * len(shape)] if places is None else places
    stored = leaf.stored_part
    found = {place: np.empty(part, dtype) for place in places}

    read_small(folder / f"{name}/{HEADER}", leaf.files[f"{name}/{HEADER}"])
    for there in leaf.places:
        cuts = {place: _overlap(place, part, there, stored) for place in places}
        if any(cuts.values()) or not shape:
            array = np.empty(stored, dtype)
            path = f"{name}/{file_of(there)}"
            read_file(folder / path, leaf.files[path][1], array.reshape(-1).view(np.uint8).data)
            for place, cut in cuts.items():
                if cut is not None:
                    found[place][cut[0]] = array[cut[1]]
    return Parts(shape, dtype, part, found)


def joined(parts: Sequence[Leaf]) -> Leaf:
    """What several processes have written of an array, as one.

    Raises:
        ValueError: they differ in what they both have written.
    """
    files: dict[str, Written] = {}
    for leaf in parts:
        if msgspec.structs.replace(leaf, files={}) != msgspec.structs.replace(parts[0], files={}):
            raise ValueError
        for path, written in leaf.files.items():
            if files.setdefault(path, written) != written:
                raise ValueError
    return msgspec.structs.replace(parts[0], files=files)


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


def tree_metadata(keys: Iterable[Key], custom: Mapping[str, Any]) -> bytes:
    """The content of `_METADATA`: a nested dict of arrays, and data of one's own.

    Orbax takes the names of folders from it, so slashes in keys are written as in these.
    """
    tree = {
        str(tuple(map(folder_name, key))): {
            "key_metadata": [{"key": folder_name(part), "key_type": 2} for part in key],  # 2: of a dict
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for key in keys
    }
    return json.dumps(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": custom,
        }
    ).encode()


def write_file(path: Path, content: bytes | memoryview) -> tuple[int, int]:
    """Write a file so that it is on the disk on return; its bytes and CRC-32.

    Several processes may write the same content to the same file at once.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a network file system may tell only now that it is full
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # write() names no file
    return len(content), zlib.crc32(content)


def read_file(path: Path, checksum: int, into: memoryview) -> None:
    """Read a file that fills the buffer.

    Raises:
        Damaged: it is missing, no file, too short or long, or has other bytes.
    """
    with _of_size(path, len(into)) as descriptor:
        _fill(descriptor, into)
    if zlib.crc32(into) != checksum:
        raise Damaged(f"{path} has other bytes than were written")


def read_small(path: Path, written: Written) -> bytes:
    """A file of known size and checksum; memory is taken once it is known to have that size.

    Raises:
        Damaged: see `read_file`.
    """
    size, checksum = written
    with _of_size(path, size) as descriptor:
        _fill(descriptor, memoryview(content := bytearray(size)))
    if zlib.crc32(content) != checksum:
        raise Damaged(f"{path} has other bytes than were written")
    return bytes(content)


@contextmanager
def _of_size(path: Path, size: int) -> Iterator[int]:
    """A file of so many bytes, opened for reading, as a descriptor."""
    try:
        with opened(path) as descriptor:
            actual = os.fstat(descriptor).st_size
            if actual != size:
                raise Damaged(f"{path} has {actual} bytes instead of {size}")
            yield descriptor
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None


def _fill(descriptor: int, into: memoryview) -> None:
    at = 0
    while at < len(into) and (count := os.readv(descriptor, [into[at:]])):
        at += count
