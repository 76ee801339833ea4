"""A checkpoint's files as orbax has them: each array a folder in zarr's form, their tree in `_METADATA`.

Orbax itself cannot write them here: under `jax.distributed` it refuses arrays that live in one process. It
reads them without this project: `orbax.checkpoint.StandardCheckpointer().restore(path)`. The forms are those
of https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html and of
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html with `use_ocdbt=False`: there
no file holds leaves of two processes, so nothing is merged. An array is stored as it lies on the devices, a
file for each shard, and a shard in pieces that have a checksum (CRC-32C) each. tensorstore writes and reads.

The small files, `rrfp.json` and what is ours in `_METADATA`, are sealed by checksums, by which damage is
found. Their schemas find what somebody else wrote, or a version with another form.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from io import BufferedReader
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np

from rrfp_jax.checkpoint.leaves import (
    Key,
    Parts,
    Place,
    file_of,
    folder_name,
    name_of,
    slices_of,
    why_unstorable,
)
from rrfp_jax.fields import printable
from rrfp_jax.files import opened_binary, sync
from rrfp_jax.json_files import Count, as_kind

if TYPE_CHECKING:  # it takes a moment to import
    import tensorstore

METADATA, HEADER, FIRST_HEADER = "_METADATA", "zarr.json", ".zarray"
"""The tree of a checkpoint; the head of an array; and that in checkpoints of the first versions."""

LARGEST_SMALL_FILE = 2**28
"""Bytes of a file that is read at once."""

PIECE_BYTES = 2**19
"""Of a piece of a shard, about: so many stay in a core's cache until their checksum is known."""

CHECKSUM_BYTES, INDEX_BYTES = 4, 16
"""Of a piece, in a shard that is cut: beside its values, and in the index of all."""

Checksum = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

Written: TypeAlias = tuple[Count, Checksum]
"""Bytes and CRC-32 of a file."""


class Damaged(Exception):
    """A file is not what was written; the message names it."""


# Small files.


def write_file(path: Path, content: bytes) -> Written:
    """Write a file so that it is on the disk on return; `OSError` names it if it cannot be written."""
    try:
        path.write_bytes(content)
        sync(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # write() names no file
    return len(content), zlib.crc32(content)


def read_file(path: Path, written: Written) -> bytes:
    """A file of known size and checksum, or `Damaged`; memory is taken once its size is seen to be right."""
    size, checksum = written
    with of_size(path, size) as file:
        content = file.read(size)
    if zlib.crc32(content) != checksum:
        raise Damaged(f"{path} has other bytes than were written")
    return content


@contextmanager
def of_size(path: Path, size: int) -> Iterator[BufferedReader]:
    """A file, opened for reading; `Damaged` if it is missing, or of another size."""
    try:
        with opened_binary(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                raise Damaged(f"{path} has {actual} bytes instead of {size}")
            yield file
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema whose keys are all that there may be."""


class LeafRecord(Strict, frozen=True, kw_only=True):
    """What is known of a stored array.

    Attributes:
        key: its way in the tree.
        shape, dtype: of the whole array.
        part: the shape of each part, a file each; None if there is but one, as the first versions wrote it.
        piece: the shape of each piece of a part, with a checksum of its own; None if a part is one piece.
        files: by path below the checkpoint's folder, in the form of the first versions; empty in today's.
    """

    key: Key
    shape: tuple[Count, ...]
    part: tuple[Count, ...] | None = None
    piece: tuple[Count, ...] | None = None
    dtype: str
    files: Mapping[str, Written] = {}

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return folder_name(name_of(self.key))

    @property
    def stored_part(self) -> Sequence[int]:
        """The shape of each part."""
        return self.shape if self.part is None else self.part

    @property
    def grid(self) -> Sequence[int]:
        """How many parts there are along each axis; 0 where an array has no element."""
        return [-(-n // max(size, 1)) for n, size in zip(self.shape, self.stored_part, strict=True)]

    @property
    def places(self) -> Iterator[Place]:
        """Of all its parts."""
        return product(*map(range, self.grid))


LeafRecords: TypeAlias = Mapping[str, LeafRecord]
"""By name."""


class StoredLeaf(Strict, frozen=True, kw_only=True):
    """What a process has written of an array: CRC-32s by file, of parts that others may write, too."""

    leaf: LeafRecord
    checksums: Mapping[str, Checksum]


class Sealed(Strict, frozen=True, kw_only=True):
    """`rrfp.json`: the checksum of its own content, and that."""

    crc32: Checksum
    content: dict[str, Any]


class Files(Strict, frozen=True, kw_only=True):
    """The files beside those of leaves."""

    metadata: Written = msgspec.field(name=METADATA)


class Content(Strict, frozen=True, kw_only=True):
    """What is sealed: size and checksum of the other small file, and all leaves by name."""

    files: Files
    leaves: dict[str, LeafRecord]


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """`_METADATA`, as far as it is ours; orbax's own keys are its own affair."""

    custom_metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """What must be known of a layer to make its parameters a tree again, where no model is at hand."""

    kind: Literal["nnx", "linen", "function"]
    paths: tuple[tuple[int | str, ...], ...]  # of its parameters; a number is an index, or such a key


@dataclass(frozen=True, kw_only=True)
class StoredBase:
    """Frozen parameters that a checkpoint leaves out, since an `init` has read them from files of others."""

    files: tuple[str, ...]  # as they were named then
    sha256: Mapping[str, str]  # of each one's values, by its path such as "3.query.base.kernel"

    def __str__(self) -> str:
        count = f"{len(self.sha256)} frozen parameters, such as {min(self.sha256, default='none')}"
        return f"{count}, which were read from {' and '.join(self.files)}"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run needs besides its arrays to go on as if it had never stopped; plain data.

    Attributes:
        step: steps done, hence the number of the next one, from which its random keys follow.
        data: the position in the data, as the data sees it.
        seed: of initial values, random keys and data order.
        standing: how training stands otherwise (loss scale, steps left out).
        config: of the run, or whatever was given for it.
        plan_hash: of the last step's microbatches.
        layers: in the model's order; empty in checkpoints of the first versions.
        base: parameters that are not kept, as files of others have them; None if all are kept.
    """

    step: Count
    data: Any = None
    seed: Count = 0
    standing: Mapping[str, Any] = field(default_factory=dict)
    config: Any = None
    plan_hash: str = ""
    layers: tuple[StoredLayer, ...] = ()
    base: StoredBase | None = None

    def stored(self) -> dict[str, Any]:
        """As it is stored: without a base earlier versions can read it, too."""
        found = asdict(self)
        return found if self.base else {key: own for key, own in found.items() if key != "base"}


StateCheck: TypeAlias = Callable[[RunState], object]
"""Raises `ValueError` for a state that nobody could go on from."""


def content_of(sealed: Sealed) -> Content:
    """The content of a manifest whose checksum is right; `ValueError` says what is not ours."""
    content = as_kind(sealed.content, Content)
    if content.files.metadata[0] > LARGEST_SMALL_FILE:
        raise ValueError(f"{METADATA} has {content.files.metadata[0]} bytes")
    for name, leaf in content.leaves.items():
        if wrong := _why_wrong(name, leaf):
            raise ValueError(f"its leaf {name!r} {wrong}")
    return content


def run_state(state: Mapping[str, Any], step: int) -> RunState:
    """The stored state of a run; `ValueError` if it is not of that step, or something else."""
    found = as_kind({"layers": (), "base": None, **state}, RunState)
    if found.step != step:
        raise ValueError(f"it is of step {found.step}")
    return found


def dtype_of(name: str) -> np.dtype[Any] | None:
    """The dtype of a name, "bfloat16" and the like among them; None if it is none of numbers."""
    if re.fullmatch("[a-z][a-z0-9_]*", name) is None:
        return None
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    numeric = dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)
    return dtype if numeric and dtype.name == name else None


def plain_dtype(value: Any) -> str:
    """The name of a dtype, or of a class that is one for NumPy; TypeError for other things, as of `json`."""
    dtype = np.dtype(value) if isinstance(value, (np.dtype, type)) else np.dtype(object)
    if dtype.hasobject:  # what classes are for NumPy
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return dtype.name


def _why_wrong(name: str, leaf: LeafRecord) -> str:
    """What cannot be in a leaf that was written here, as the end of a sentence; empty if nothing is wrong."""
    if name != name_of(leaf.key):
        return f"has the key {list(leaf.key)}"
    dtype, part = dtype_of(leaf.dtype), leaf.stored_part
    if dtype is None:
        return f"has the dtype {leaf.dtype!r}"
    piece = part if leaf.piece is None else leaf.piece
    for what, whole, cut in (("parts", leaf.shape, part), ("pieces", part, piece)):
        fits = (n % m == 0 if m > 0 and n else n == m == 0 for n, m in zip(whole, cut, strict=False))
        if len(whole) != len(cut) or not all(fits):
            return f"has {what} {list(cut)} of {list(whole)}"
    if leaf.files and (wrong := _wrong_file(leaf, dtype.itemsize * math.prod(part))):
        return wrong
    return why_unstorable(name)


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
    content = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": custom,
    }
    return json.dumps(content).encode()


# Arrays.


def write_leaf(folder: Path, key: Key, leaf: Parts, checked: bool = True) -> StoredLeaf:
    """Write this process's parts of an array below a checkpoint's folder, a file each; they are on the disk.

    Several processes may write the same part at once. `checked` says that they may, so that what they have
    written must be compared. Raises `OSError`.
    """
    import tensorstore as ts

    shape, part = tuple(leaf.shape), tuple(leaf.part)
    piece = _piece(part, leaf.dtype.itemsize)
    stored = LeafRecord(key=key, shape=shape, part=part, piece=piece, dtype=leaf.dtype.name)
    there = {place: array for place, array in leaf.arrays.items() if array.size}
    spec = _spec(folder, stored)
    try:
        files = ts.KvStore.open(spec["kvstore"], context=context()).result()
        array = ts.open(spec, open=True, assume_metadata=True, context=context()).result()
        writing: list[Any] = [files.write(HEADER, _header(stored))]
        for place, values in there.items():
            bits = values.view(array.dtype.numpy_dtype)
            target = array[slices_of(place, part)]
            writing.append(target.write(bits, can_reference_source_data_indefinitely=True))
        for file in writing:
            file.result()
    except ValueError as error:
        raise _os_error(error, folder / stored.folder) from None
    checksums = {
        file_of(place): zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        for place, values in (there if checked else {}).items()
    }
    return StoredLeaf(leaf=stored, checksums=checksums)


def read_leaf(
    folder: Path, leaf: LeafRecord, part: Sequence[int] | None = None, places: Sequence[Place] | None = None
) -> Parts:
    """Of a stored array some parts, of this shape and at these places, however it was cut when written.

    Without a shape it is the whole array, without places the first part. `Damaged` if a file is missing, too
    short or long, or has other bytes.
    """
    import tensorstore as ts

    part = leaf.shape if part is None else part
    places = [(0,) * len(leaf.shape)] if places is None else places
    if leaf.files:
        return _read_first(folder, leaf, part, places)
    dtype, header = np.dtype(leaf.dtype), _header(leaf)
    cuts = {place: slices_of(place, part) for place in places}
    read_file(folder / leaf.folder / HEADER, (len(header), zlib.crc32(header)))
    for path, size in files_of(leaf, cuts.values()):  # tensorstore would wait for pipes
        with of_size(folder / path, size):
            pass
    try:
        spec = _spec(folder, leaf)
        array = ts.open(spec, open=True, read=True, assume_metadata=True, context=context()).result()
        reading = {place: array[cut].read() for place, cut in cuts.items()}
        found = {place: np.asarray(values.result()).view(dtype) for place, values in reading.items()}
    except (ValueError, RuntimeError, IndexError) as error:
        raise Damaged(_damage(error, folder / leaf.folder)) from None
    return Parts(leaf.shape, dtype, part, found)


def joined(parts: Sequence[StoredLeaf]) -> LeafRecord | None:
    """What several processes have written of an array, as one; None if they differ."""
    checksums = {pair for own in parts for pair in own.checksums.items()}
    same = len(checksums) == len(dict(checksums)) and all(own.leaf == parts[0].leaf for own in parts)
    return parts[0].leaf if same else None


def files_of(leaf: LeafRecord, cuts: Collection[Sequence[slice]] | None = None) -> Iterator[tuple[str, int]]:
    """The files of these slices of an array, or of all, below the checkpoint's folder, with their bytes."""
    part = leaf.stored_part
    yield f"{leaf.folder}/{HEADER}", len(_header(leaf))
    pieces = math.prod(part) // math.prod(leaf.piece) if leaf.piece else 1
    size = math.prod(part) * np.dtype(leaf.dtype).itemsize + pieces * CHECKSUM_BYTES
    size += pieces * INDEX_BYTES + CHECKSUM_BYTES if leaf.piece else 0
    sizes = [max(1, n) for n in part]
    for cut in [tuple(map(slice, leaf.shape))] if cuts is None else cuts:
        touched = [range((own.start or 0) // n, -(-own.stop // n)) for own, n in zip(cut, sizes, strict=True)]
        for place in product(*touched):
            yield f"{leaf.folder}/{file_of(place)}", size


@cache
def context() -> tensorstore.Context:
    """How tensorstore treats files: no locks, which some file systems do not have; synced when written."""
    import tensorstore as ts

    return ts.Context({"file_io_locking": {"mode": "none"}, "file_io_sync": True})


def _spec(folder: Path, leaf: LeafRecord) -> dict[str, Any]:
    """An array of a checkpoint as tensorstore asks for it."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder.absolute() / leaf.folder}/"},
        "metadata": _metadata(leaf),
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _header(leaf: LeafRecord) -> bytes:
    return json.dumps(_metadata(leaf)).encode()


def _metadata(leaf: LeafRecord) -> dict[str, Any]:
    """The content of an array's `zarr.json`."""
    import tensorstore as ts

    dtype = np.dtype(leaf.dtype)
    try:
        known = ts.dtype(leaf.dtype).name
    except ValueError:  # tensorstore does not know it, such as "uint4"; the manifest does
        known = "uint8"
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
        "data_type": known,
        "fill_value": {"b": False, "c": [0, 0]}.get(dtype.kind, 0),
        "chunk_grid": {"name": "regular", "configuration": grid},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
        "codecs": codecs,
    }


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


def _os_error(error: ValueError, path: Path) -> OSError:
    """What tensorstore says as the system had said it; `path` is named where that names no file."""
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    number = int(code[1]) if code else errno.EIO
    reason = os.strerror(number) if code else printable(text.partition(" [")[0])
    return OSError(number, reason, _file_in(text, path))


def _damage(error: Exception, path: Path) -> str:
    """What tensorstore says of a file that it cannot read, as a sentence that begins with the file."""
    text = str(error).partition(" [")[0]
    if "Digest mismatch" in text:
        return f"{_file_in(text, path)} has other bytes than were written"
    return printable(f"{_file_in(text, path)} cannot be read: {text[:300]}")


def _file_in(text: str, path: Path) -> str:
    file = re.search(r'local file "(.+?)"', text)
    return file[1] if file else str(path)


# Arrays as the first versions wrote them, which are only read: zarr 2, with a CRC-32 of every file.


def _wrong_file(leaf: LeafRecord, part_bytes: int) -> str:
    """A file that a leaf cannot have, or that there are too many or too few, as the end of a sentence."""
    count = 1 + math.prod(leaf.grid)
    if count != len(leaf.files):  # before all places are counted up
        return f"has {len(leaf.files)} files instead of {count}"
    header = f"{leaf.folder}/{FIRST_HEADER}"
    parts = {f"{leaf.folder}/{file_of(place)}" for place in leaf.places}
    for path, (size, _) in leaf.files.items():
        fits = size <= LARGEST_SMALL_FILE if path == header else path in parts and size == part_bytes
        if not fits:
            return f"has a file {path!r} of {size} bytes"
    return ""


def _read_first(folder: Path, leaf: LeafRecord, part: Sequence[int], places: Sequence[Place]) -> Parts:
    """See `read_leaf`; the whole array is read, whatever of it is wanted."""
    whole, header = np.empty(leaf.shape, leaf.dtype), f"{leaf.folder}/{FIRST_HEADER}"
    read_file(folder / header, leaf.files[header])
    for there in leaf.places:
        path = f"{leaf.folder}/{file_of(there)}"
        content = np.frombuffer(read_file(folder / path, leaf.files[path]), leaf.dtype)
        whole[slices_of(there, leaf.stored_part)] = content.reshape(leaf.stored_part)
    found = {place: np.asarray(whole[slices_of(place, part)]) for place in places}
    return Parts(leaf.shape, whole.dtype, part, found)
