"""Frozen parameters that an `init` reads from published files, of which checkpoints keep no copy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rrfp_jax.checkpoint.format import StoredBase
from rrfp_jax.checkpoint.saving import FILES_AT_ONCE, needs_base
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.programs.initial import InitFunction, ModelCheckedInit, SourcedInit
from rrfp_jax.user_code import called

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""In which a run may have read a base before."""


@dataclass
class FrozenBase:
    """An init function, and which frozen parameters are as it has read them from files."""

    init: InitFunction
    roles: Callable[[], Roles] = field(init=False)  # of the present engine, given before anything is read
    _left: Collection[str] | None = None  # by the checkpoint that has given all other values; None: by none
    _known: dict[str, str] = field(default_factory=dict)  # SHA-256 of values on this process's devices

    def __call__(self, path: str, spec: jax.ShapeDtypeStruct) -> Any:
        """What the function gives."""
        with called(f"init({path!r}, spec)", UsageError):
            return self.init(path, spec)

    def source_of(self, path: str) -> str | None:
        """See `SourcedInit`."""
        owner = self.roles().owners.get(path, path)
        return self.init.source_of(owner) if isinstance(self.init, SourcedInit) else None

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """See `ModelCheckedInit`."""
        if isinstance(self.init, ModelCheckedInit):
            self.init.check_model(params, owners)

    def kept(self) -> StoredBase | None:
        """What a checkpoint leaves out now, without hashes, equal on all processes; None for nothing."""
        frozen = sorted(self.roles().frozen)
        files = {path: self.source_of(path) for path in frozen if self._left is None or path in self._left}
        sources = {path: file for path, file in files.items() if file is not None}
        names = tuple(sorted({*sources.values()}))
        return StoredBase(files=names, sha256=dict.fromkeys(sources, "")) if sources else None

    def replaced(self, left_out: Collection[str]) -> None:
        """A checkpoint has given all values but these, which are as it names them."""
        self._left = left_out
        self._known = {path: own for path, own in self._known.items() if path in left_out}

    def sha256(self, leaves: Mapping[str, jax.Array]) -> dict[str, str]:
        """Of the values of frozen parameters on this process's devices; in any thread."""
        new = {path: leaf for path, leaf in leaves.items() if path not in self._known}
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            digests = pool.map(lambda path: _digest(self._value(path, new[path])), new)
            self._known |= zip(new, digests, strict=True)
        return {path: self._known[path] for path in leaves}

    def refusal(self, leaves: Mapping[str, jax.Array], folder: Path, base: StoredBase) -> str:
        """Why what a checkpoint leaves out is not what this process's devices have; "" if it is."""
        if not all(map(self.source_of, base.sha256)):
            return needs_base(folder, base)
        found = self.sha256({path: leaf for path, leaf in leaves.items() if path in base.sha256})
        other = sorted(path for path, digest in found.items() if digest != base.sha256[path])
        if not other:
            return ""
        path, dtype = other[0], leaves[other[0]].dtype
        for name in DTYPES:
            if name != dtype.name and self._digest_as(name, path, leaves[path]) == base.sha256[path]:
                return (
                    f"{folder} leaves out {base}; {path} was {name} there and is {dtype} here: give the "
                    f"frozen parameters the dtype that the run began with"
                )
        alike = [own for own in base.sha256 if own not in other and base.sha256[own] == base.sha256[path]]
        tie = f"; {path} was equal to {alike[0]} there: if tied, tie them here, too" if alike else ""
        return (
            f"{folder} leaves out {base}; now {self.source_of(path)} has other values of {len(other)} of "
            f"them, such as {path}: give the files and the dtypes that the run began with{tie}"
        )

    def _value(self, path: str, leaf: jax.Array) -> np.ndarray[Any, Any]:
        """A whole array, as far as it is here; the rest, which other processes have, as files have it now."""
        shards = {str(shard.index): shard for shard in leaf.addressable_shards}
        value = np.empty(leaf.shape, leaf.dtype)
        if sum(shard.data.size for shard in shards.values()) < leaf.size:
            value[...] = self._read(path, leaf.shape, leaf.dtype)
        with jax.transfer_guard_device_to_host("allow"):
            for shard in shards.values():
                value[shard.index] = shard.data
        return value

    def _read(self, path: str, shape: Any, dtype: Any) -> Any:
        return self.init(self.roles().owners.get(path, path), jax.ShapeDtypeStruct(shape, dtype))

    def _digest_as(self, dtype: str, path: str, leaf: jax.Array) -> str:
        try:
            return _digest(self._read(path, leaf.shape, dtype))
        except UsageError:  # it is not in the files so
            return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).hexdigest()
