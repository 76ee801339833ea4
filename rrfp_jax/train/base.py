"""Frozen parameters that an `init` has read from published files, of which checkpoints keep no copy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rrfp_jax.checkpoint.format import StoredBase
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.programs.initial import InitFunction, ModelCheckedInit, SourcedInit
from rrfp_jax.runtime.run.world import START_SECONDS, World


@dataclass
class FrozenBase:
    """An init function that notes what it gives for frozen parameters: the files, and the values' SHA-256.

    `kept` is what it has noted, of all processes, and is no longer so once a checkpoint gives other values.
    """

    init: InitFunction
    roles: Callable[[], Roles] = field(init=False)  # of the present engine, given before anything is read
    _noted: dict[str, tuple[str, str]] = field(default_factory=dict)
    _kept: dict[str, tuple[str, str]] | None = None

    def __call__(self, path: str, spec: jax.ShapeDtypeStruct) -> Any:
        """What the function gives."""
        value = self.init(path, spec)
        if value is not None and path in self.roles().frozen and (file := self.source_of(path)):
            self._noted[path] = file, _digest(value)
        return value

    def source_of(self, path: str) -> str | None:
        """See `SourcedInit`."""
        return self.init.source_of(path) if isinstance(self.init, SourcedInit) else None

    def reads(self, path: str) -> bool:
        """Whether a parameter is frozen, and its value in files."""
        roles = self.roles()
        return path in roles.frozen and bool(self.source_of(roles.owners.get(path, path)))

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """See `ModelCheckedInit`."""
        if isinstance(self.init, ModelCheckedInit):
            self.init.check_model(params, owners)

    def kept(self, world: World) -> StoredBase | None:
        """What a checkpoint leaves out now; None for nothing. All processes together, after the start."""
        if not isinstance(self.init, SourcedInit):
            return None
        if self._kept is None:
            told = world.gather("the frozen parameters that are in files", self._noted, START_SECONDS)
            found = {path: tuple(own) for part in told for path, own in part.items()}
            roles = self.roles()
            owners = {path: roles.owners.get(path, path) for path in sorted(roles.frozen)}
            self._kept = {path: found[owner] for path, owner in owners.items() if owner in found}
        if not self._kept:
            return None
        files = tuple(sorted({file for file, _ in self._kept.values()}))
        return StoredBase(files=files, sha256={path: digest for path, (_, digest) in self._kept.items()})

    def replaced(self, left_out: Collection[str]) -> None:
        """A checkpoint has given all values but these."""
        self._kept = {path: own for path, own in (self._kept or {}).items() if path in left_out}


def _digest(value: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).hexdigest()
