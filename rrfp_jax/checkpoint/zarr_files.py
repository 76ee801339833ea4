"""A checkpoint's files as orbax has them: each array a folder in zarr's form, their tree in `_METADATA`.

Orbax itself cannot write them here: under `jax.distributed` it refuses arrays that live in one process. It
reads them without this project: `orbax.checkpoint.StandardCheckpointer().restore(path)`. The forms are those
of https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html and of
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html with `use_ocdbt=False`: there
no file holds leaves of two processes, so nothing is merged. An array is stored as it lies on the devices, a
file for each shard, and a shard in pieces that have a checksum (CRC-32C) each. tensorstore writes and reads.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rrfp_jax.checkpoint import first_format
from rrfp_jax.checkpoint.leaves import Key, folder_name, name_of
from rrfp_jax.checkpoint.manifest import HEADER, LeafRecord, StoredLeaf
from rrfp_jax.checkpoint.parts import Parts, Place, file_of, slices_of
from rrfp_jax.checkpoint.small_files import Damaged, of_size, read_small
from rrfp_jax.fields import printable

if TYPE_CHECKING:  # it takes a moment to import
    import tensorstore

PIECE_BYTES = 2**19
"""Of a piece of a shard, about: so many stay in a core's cache until their checksum is known."""

CHECKSUM_BYTES, INDEX_BYTES = 4, 16
"""Of a piece, in a shard that is cut: beside its values, and in the index of all."""

UNKNOWN = "uint8"
"""What bytes are stored as whose dtype tensorstore does not know, such as "uint4"; the manifest knows it."""


def write_leaf(folder: Path, key: Key, leaf: Parts, checked: bool = True) -> StoredLeaf:
    """Write this process's parts of an array below a checkpoint's folder, a file each; they are on the disk.

    Several processes may write the same part at once.

    Args:
        folder: of the checkpoint.
        key: of the array.
        leaf: its parts.
        checked: whether other processes may write these parts, too, so that they must be compared.

    Raises:
        OSError: they cannot be written.
    """
    import tensorstore as ts

    piece = _piece(leaf.part, leaf.dtype.itemsize)
    stored = LeafRecord(
        key=key, shape=tuple(leaf.shape), part=tuple(leaf.part), piece=piece, dtype=leaf.dtype.name
    )
    there = {place: array for place, array in leaf.arrays.items() if array.size}
    spec = _spec(folder, stored)
    try:
        files = ts.KvStore.open(spec["kvstore"], context=context()).result()
        array = ts.open(spec, open=True, assume_metadata=True, context=context()).result()
        writing: list[Any] = [files.write(HEADER, _header(stored))]
        for place, values in there.items():
            bits = values.view(array.dtype.numpy_dtype)
            target = array[slices_of(place, leaf.part)]
            writing.append(target.write(bits, can_reference_source_data_indefinitely=True))
        for file in writing:
            file.result()
    except ValueError as error:
        raise _os_error(error, folder / folder_name(name_of(key))) from None
    checksums = {file_of(place): _checksum(values) for place, values in there.items()} if checked else {}
    return StoredLeaf(leaf=stored, checksums=checksums)


def read_leaf(
    folder: Path, leaf: LeafRecord, part: Sequence[int] | None = None, places: Sequence[Place] | None = None
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
    import tensorstore as ts

    part = leaf.shape if part is None else part
    places = [(0,) * len(leaf.shape)] if places is None else places
    if leaf.files:
        return first_format.read_leaf(folder, leaf, part, places)
    name, dtype = folder_name(name_of(leaf.key)), np.dtype(leaf.dtype)
    cuts = {place: slices_of(place, part) for place in places}
    header = _header(leaf)
    read_small(folder / name / HEADER, (len(header), zlib.crc32(header)))
    for path, size in _files(leaf, cuts.values()):  # tensorstore would wait for pipes
        with of_size(folder / path, size):
            pass
    try:
        spec = _spec(folder, leaf)
        array = ts.open(spec, open=True, read=True, assume_metadata=True, context=context()).result()
        reading = {place: array[cut].read() for place, cut in cuts.items()}
        found = {place: np.asarray(values.result()).view(dtype) for place, values in reading.items()}
    except (ValueError, RuntimeError, IndexError) as error:
        raise Damaged(_damage(error, folder / name)) from None
    return Parts(leaf.shape, dtype, part, found)


def joined(parts: Sequence[StoredLeaf]) -> LeafRecord:
    """What several processes have written of an array, as one.

    Raises:
        ValueError: they differ in what they both have written.
    """
    checksums: dict[str, int] = {}
    for own in parts:
        if own.leaf != parts[0].leaf:
            raise ValueError
        for file, checksum in own.checksums.items():
            if checksums.setdefault(file, checksum) != checksum:
                raise ValueError
    return parts[0].leaf


def files_of(leaf: LeafRecord) -> Iterator[tuple[str, int]]:
    """All files of an array, below the checkpoint's folder, with their bytes."""
    return _files(leaf, [tuple(map(slice, leaf.shape))])


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
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": custom,
        }
    ).encode()


@cache
def context() -> tensorstore.Context:
    """How tensorstore treats files: no locks, which some file systems do not have; synced when written."""
    import tensorstore as ts

    return ts.Context({"file_io_locking": {"mode": "none"}, "file_io_sync": True})


def _spec(folder: Path, leaf: LeafRecord) -> dict[str, Any]:
    """An array of a checkpoint as tensorstore asks for it."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder.absolute() / folder_name(name_of(leaf.key))}/"},
        "metadata": _metadata(leaf),
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _header(leaf: LeafRecord) -> bytes:
    return json.dumps(_metadata(leaf)).encode()


def _metadata(leaf: LeafRecord) -> dict[str, Any]:
    """The content of an array's `zarr.json`."""
    dtype = np.dtype(leaf.dtype)
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    codecs: list[Any] = [{"name": "bytes", **order}, {"name": "crc32c"}]
    if leaf.piece is not None:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        cut = {"chunk_shape": leaf.piece, "codecs": codecs, "index_codecs": index}
        codecs = [{"name": "sharding_indexed", "configuration": cut}]
    grid = {"chunk_shape": [max(1, n) for n in leaf.stored_part]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": leaf.shape,
        "data_type": _known(leaf.dtype),
        "fill_value": {"b": False, "c": [0, 0]}.get(dtype.kind, 0),
        "chunk_grid": {"name": "regular", "configuration": grid},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
        "codecs": codecs,
    }


def _known(dtype: str) -> str:
    import tensorstore as ts

    try:
        return ts.dtype(dtype).name
    except ValueError:
        return UNKNOWN


def _piece(part: Sequence[int], itemsize: int) -> tuple[int, ...] | None:
    """The shape of the pieces of a part, which fill it; None for a small one, or one that cannot be cut."""
    piece = list(part)
    for axis, size in enumerate(part):
        row = itemsize * math.prod(part[axis + 1 :])
        if size * row <= PIECE_BYTES:
            break
        most = PIECE_BYTES // row
        piece[axis] = next((n for n in range(most, most // 8, -1) if size % n == 0), size) if most else 1
        if most:
            break
    return None if piece == list(part) else tuple(piece)


def _checksum(values: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _files(leaf: LeafRecord, cuts: Collection[Sequence[slice]]) -> Iterator[tuple[str, int]]:
    """The files that have these slices of an array, as `files_of` has them."""
    name, part = folder_name(name_of(leaf.key)), leaf.stored_part
    yield f"{name}/{HEADER}", len(_header(leaf))
    pieces = math.prod(part) // math.prod(leaf.piece) if leaf.piece else 1
    size = math.prod(part) * np.dtype(leaf.dtype).itemsize + pieces * CHECKSUM_BYTES
    size += pieces * INDEX_BYTES + CHECKSUM_BYTES if leaf.piece else 0
    for cut in cuts:
        touched = [
            range((own.start or 0) // max(n, 1), -(-own.stop // max(n, 1)))
            for own, n in zip(cut, part, strict=True)
        ]
        for place in product(*touched):
            yield f"{name}/{file_of(place)}", size


def _os_error(error: ValueError, path: Path) -> OSError:
    """What tensorstore says as the system had said it; `path` is named where that names no file."""
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    file = re.search(r'local file "(.+?)"', text)
    number = int(code[1]) if code else errno.EIO
    reason = os.strerror(number) if code else printable(text.partition(" [")[0])
    return OSError(number, reason, file[1] if file else str(path))


def _damage(error: Exception, path: Path) -> str:
    """What tensorstore says of a file that it cannot read, as a sentence that begins with the file."""
    text = str(error).partition(" [")[0]
    file = re.search(r'local file "(.+?)"', text)
    where = file[1] if file else str(path)
    if "Digest mismatch" in text:
        return f"{where} has other bytes than were written"
    return printable(f"{where} cannot be read: {text[:300]}")
