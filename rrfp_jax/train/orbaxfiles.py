"""A checkpoint's files as orbax has them: each array a folder in zarr's form, their tree in `_METADATA`.

Orbax itself cannot write them here: under `jax.distributed` it refuses arrays that live in one process. It
reads them without this project: `orbax.checkpoint.StandardCheckpointer().restore(path)`. The forms are those
of https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html and of
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html with `use_ocdbt=False`: there
no file holds leaves of two processes, so nothing is merged. An array is stored as it is, in one chunk.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rrfp_jax.train.leaves import Key, name_of

METADATA = "_METADATA"

Leaf: TypeAlias = dict[str, Any]
"""What is known of a stored array, as plain data: key, shape, dtype, and files: {path: [bytes, CRC-32]}."""


class Damaged(Exception):
    """A file is not what was written; the message names it."""


def write_leaf(folder: Path, key: Key, array: np.ndarray) -> Leaf:
    """Write an array below a checkpoint's folder.

    Raises:
        OSError: it cannot be written.
    """
    name = name_of(key)
    (folder / name).mkdir(exist_ok=True)
    header = {
        "chunks": [max(1, n) for n in array.shape],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": array.dtype.name if array.dtype.kind == "V" else array.dtype.str,  # "bfloat16" or "<f4"
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
    contents: dict[str, bytes | memoryview] = {f"{name}/.zarray": json.dumps(header).encode()}
    if array.size:
        contents[f"{name}/{_chunk(array.shape)}"] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        )
    return {
        "key": list(key),
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "files": {path: list(write_file(folder / path, content)) for path, content in contents.items()},
    }


def read_leaf(folder: Path, leaf: Leaf) -> np.ndarray:
    """The array that `write_leaf` has written, given what it returned.

    Raises:
        Damaged: a file is missing, too short or long, or has other bytes.
    """
    array = np.empty(leaf["shape"], np.dtype(leaf["dtype"]))
    data = array.reshape(-1).view(np.uint8).data
    for path, (size, checksum) in leaf["files"].items():
        into = memoryview(bytearray(size)) if path.endswith("/.zarray") else data
        read_file(folder / path, checksum, into)
    return array


def tree_metadata(keys: Iterable[Key], custom: Mapping[str, Any]) -> bytes:
    """The content of `_METADATA`: a nested dict of arrays, and data of one's own."""
    tree = {
        str(key): {
            "key_metadata": [{"key": part, "key_type": 2} for part in key],  # 2: of a dict
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
        Damaged: it is missing, too short or long, or has other bytes.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != len(into):
                raise Damaged(f"{path} has {size} bytes instead of {len(into)}")
            at = 0
            while at < size and (count := file.readinto(into[at:])):
                at += count
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    if zlib.crc32(into) != checksum:
        raise Damaged(f"{path} has other bytes than were written")


def _chunk(shape: tuple[int, ...]) -> str:
    """The name of an array's first chunk, here its only one."""
    return ".".join("0" for _ in shape) or "0"
