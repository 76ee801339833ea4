"""The small files of a checkpoint as schemas: `rrfp.json`, and what is ours in orbax's `_METADATA`.

They are sealed by checksums, so a file that was damaged is found by them. The schemas find one that was
written by somebody else, or by a version with another form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from rrfp_jax.checkpoint.first_format import wrong_file
from rrfp_jax.checkpoint.leaves import Key, name_of, why_unstorable
from rrfp_jax.checkpoint.parts import Place
from rrfp_jax.checkpoint.small_files import LARGEST_SMALL_FILE, Checksum, Written
from rrfp_jax.json_files import Count, as_kind

METADATA = "_METADATA"

HEADER = "zarr.json"

LayerKind: TypeAlias = Literal["nnx", "linen", "function"]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema whose keys are all that there may be."""


class LeafRecord(Strict, frozen=True, kw_only=True):
    """What is known of a stored array.

    Attributes:
        key: its way in the tree.
        shape, dtype: of the whole array.
        part: the shape of each part, a file each; None if there is but one, as the first versions wrote it.
        piece: the shape of each piece of a part, with a checksum of its own; None if a part is one piece.
        files: by path below the checkpoint's folder; none of those that are written now, see `first_format`.
    """

    key: Key
    shape: tuple[Count, ...]
    part: tuple[Count, ...] | None = None
    piece: tuple[Count, ...] | None = None
    dtype: str
    files: Mapping[str, Written] = {}

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


class StoredLeaf(Strict, frozen=True, kw_only=True):
    """What a process has written of an array.

    Attributes:
        leaf: the array.
        checksums: CRC-32 of this process's parts, by file; none of those that no other process writes.
    """

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
    """What must be known of a layer to make its parameters a tree again, where no model is at hand.

    Attributes:
        kind: "nnx", "linen" or "function".
        paths: of its parameters in it; a number is an index, or a key that is a whole number.
    """

    kind: LayerKind
    paths: tuple[tuple[int | str, ...], ...]


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
    """

    step: Count
    data: Any = None
    seed: Count = 0
    standing: Mapping[str, Any] = field(default_factory=dict)
    config: Any = None
    plan_hash: str = ""
    layers: tuple[StoredLayer, ...] = ()


def content_of(sealed: Sealed) -> Content:
    """The content of a manifest whose checksum is right.

    Raises:
        ValueError: it is not what this version writes; says where.
    """
    content = as_kind(sealed.content, Content)
    if content.files.metadata[0] > LARGEST_SMALL_FILE:
        raise ValueError(f"{METADATA} has {content.files.metadata[0]} bytes")
    for name, leaf in content.leaves.items():
        wrong = _why_wrong(name, leaf)
        if wrong:
            raise ValueError(f"its leaf {name!r} {wrong}")
    return content


def unknown_keys(state: Mapping[str, Any]) -> list[str]:
    """What is in a stored `RunState` that this version has no name for."""
    return sorted(state.keys() - {item.name for item in fields(RunState)})


def run_state(state: Mapping[str, Any], step: int) -> RunState:
    """The stored state of a run, which must be that of a step.

    Raises:
        ValueError: it is another, or something else.
    """
    found = as_kind({"layers": (), **state}, RunState)
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


def _why_wrong(name: str, leaf: LeafRecord) -> str:
    """What cannot be in a leaf that was written here, as the end of a sentence; empty if nothing is wrong."""
    if name != name_of(leaf.key):
        return f"has the key {list(leaf.key)}"
    dtype, part = dtype_of(leaf.dtype), leaf.stored_part
    if dtype is None:
        return f"has the dtype {leaf.dtype!r}"
    if len(part) != len(leaf.shape) or not all(map(_is_part, leaf.shape, part)):
        return f"has parts {list(part)} of {list(leaf.shape)}"
    piece = part if leaf.piece is None else leaf.piece
    if len(piece) != len(part) or not all(map(_is_part, part, piece)):
        return f"has pieces {list(piece)} of {list(part)}"
    if leaf.files and (wrong := wrong_file(leaf, dtype.itemsize * math.prod(part))):
        return wrong
    return why_unstorable(name)


def _is_part(size: int, part: int) -> bool:
    """Whether an axis can be cut into parts of that size."""
    return part > 0 and size % part == 0 if size else part == 0
