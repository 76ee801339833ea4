"""The parameters of a checkpoint as tensors under public names: what `rrfp-export` writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rrfp_jax.checkpoint.leaves import PARAMETERS, Key
from rrfp_jax.checkpoint.manifest import dtype_of
from rrfp_jax.checkpoint.orbax_files import Damaged
from rrfp_jax.checkpoint.reading import Stored as Checkpoint
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.families.family import CONFIG, TIED, Family
from rrfp_jax.families.tables import Stored
from rrfp_jax.train.stored import MOST_TOLD, converted, some
from rrfp_jax.train.tensor_folder import Source

_LAYERS = "n_layers"
"""The field by which the config of layers is known."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What is to be written.

    Attributes:
        sources: of all tensors.
        others: JSON files, by name.
        left_out: paths of parameters that are in none of them.
    """

    sources: Sequence[Source]
    others: Mapping[str, Any]
    left_out: Sequence[str]


@dataclass(frozen=True)
class Parameters:
    """Those of a checkpoint, read one by one.

    Attributes:
        checkpoint: that they are in.
        dtype: in which floating-point values are given; None as they are stored.
    """

    checkpoint: Checkpoint
    dtype: np.dtype[Any] | None = None

    @property
    def keys(self) -> dict[str, Key]:
        """By path, such as "3.attention.query.kernel", in the order of layers."""
        keys = [key for key in self.checkpoint.leaves if key[0] == PARAMETERS]
        return {".".join(key[1:]): key for key in sorted(keys, key=lambda key: (int(key[1]), key[2:]))}

    def read(self, path: str) -> np.ndarray[Any, Any]:
        """One of them.

        Raises:
            TrainingError: a file is damaged.
            UsageError: a value is too large for the dtype.
        """
        try:
            value = self.checkpoint.array(self.keys[path])
        except Damaged as error:
            raise TrainingError(f"{error}; give --step= of another checkpoint") from None
        dtype = self.dtype_of(path)
        try:
            return value if value.dtype == dtype else converted(value, dtype)
        except ValueError as error:
            raise UsageError(f"--dtype={dtype.name}: too small for {error} of {path}; leave it out") from None

    def dtype_of(self, path: str) -> np.dtype[Any]:
        """In which a parameter is given."""
        stored = dtype_of(self.checkpoint.leaves[self.keys[path]].dtype)
        assert stored is not None  # the manifest's schema has seen to that
        floating = stored.kind in "fV"  # V: bfloat16 and float8
        return self.dtype if floating and self.dtype is not None else stored

    def source(self, path: str, stored: Stored) -> Source:
        """What makes the public tensors of one of them."""
        shape = self.checkpoint.leaves[self.keys[path]].shape
        nbytes = math.prod(shape) * self.dtype_of(path).itemsize
        return Source(stored.names, nbytes, lambda: stored.arrangement.theirs(self.read(path)))


def own_names(params: Parameters) -> Publication:
    """All parameters under the names that they have here."""
    return Publication(
        sources=[params.source(path, Stored((path,))) for path in params.keys], others={}, left_out=[]
    )


def as_family(
    params: Parameters, family: Family, first: int | None, fields: Mapping[str, Any]
) -> Publication:
    """The parameters of a published family's layers under its names, and its JSON files.

    Args:
        params: of the whole model.
        family: whose names are wanted.
        first: the number of the first of these layers; None if the model has no others.
        fields: of the config of these layers.

    Raises:
        UsageError: the layers' parameters or their config are not the family's.
    """
    files, blocks = family.files_of(fields), int(fields["n_layers"])
    begin = first or 0
    table = family.stored(fields, begin, family.prefixes[0], tied=False)
    head, embedding = f"{begin + blocks + 1}.{TIED}", f"{begin}.{TIED}"
    paths = params.keys
    if missing := [path for path in table if path not in paths]:
        raise UsageError(
            f"{params.checkpoint.folder} lacks {len(missing)} parameters of {family.name} with {blocks} "
            f"blocks from layer {begin} on: {some(missing[:MOST_TOLD], len(missing))}"
        )
    layers = range(begin, begin + blocks + 2)
    left_out = [path for path in paths if path not in table]
    kept = tuple(f"{layers[-1]}.{beginning}" for beginning in family.elsewhere)
    wrong = [path for path in left_out if _layer(path) in layers and not path.startswith(kept)]
    outside = [path for path in left_out if _layer(path) not in layers] if first is None else []
    if others := wrong or outside:
        raise UsageError(
            f"{params.checkpoint.folder} has parameters besides those of {family.name}: "
            f"{some(others[:MOST_TOLD], len(others))}"
            + ("" if wrong else "; for a part of a model give --first=, the number of the part's first layer")
        )
    if head in table:
        files[CONFIG]["tie_word_embeddings"] = tied = _equal(params.read(embedding), params.read(head))
        if tied:
            del table[head]
    files[CONFIG]["torch_dtype"] = params.dtype_of(next(iter(table))).name
    sources = [params.source(path, stored) for path, stored in table.items()]
    return Publication(sources=sources, others=files, left_out=[p for p in left_out if p != head])


def fields_at(checkpoint: Checkpoint, place: str) -> Mapping[str, Any]:
    """The fields of the layers' config, in the config that is kept with a checkpoint.

    Args:
        checkpoint: of a run.
        place: such as "model", or "model.decoder".

    Raises:
        UsageError: there is none.
    """
    found = checkpoint.run.config
    for name in place.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict) or _LAYERS not in found:
        there = ", ".join(_places(checkpoint.run.config)) or "none"
        raise UsageError(
            f"{checkpoint.folder}: the config that is kept with it has no object {place!r} with the sizes of "
            f"the layers; give its name with --model= (it has: {there}). A script keeps one with "
            f'trainer.save(folder, config={{"model": dataclasses.asdict(cfg)}})'
        )
    return found


def _places(config: Any, prefix: str = "") -> Iterator[str]:
    """Names of all objects in a config that have the sizes of layers."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict) and _LAYERS in value:
            yield prefix + name
        yield from _places(value, f"{prefix}{name}.")


def _layer(path: str) -> int:
    return int(path.partition(".")[0])


def _equal(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """To the bit."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
