"""Which parameters are trained, and which are one and the same: what `frozen=` and `tied=` mean leaf by leaf.

Every leaf is one of

    owned    has a gradient, an optimizer state and a share in the norms; its stage updates it
    alias    has a gradient, which goes to its owner's stage; gets the owner's value back
    frozen   has none of that, and nothing below the first layer with another leaf is differentiated
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.paths import from_the_front, leaf_paths, partial_tree, some_of


@dataclass(frozen=True)
class LeafRoles:
    """The roles of the leaves of a tree of parameters, by their places in its flat list.

    Attributes:
        structure: of the tree, {layer index as text: tree}.
        trained: places of the leaves that have a gradient: owned ones and aliases.
        owned: places of the leaves that the optimizer updates.
        owners: places of the owned leaves that have aliases, with their number.
    """

    structure: Any
    trained: tuple[int, ...]
    owned: tuple[int, ...]
    owners: Mapping[int, int]

    @cached_property
    def aliases(self) -> tuple[int, ...]:
        """Places of the leaves whose owner is another one."""
        return tuple(sorted({*self.trained} - {*self.owned}))

    @cached_property
    def number(self) -> Mapping[int, int]:
        """The index of each trained leaf, given by place, among the trained ones."""
        return {place: i for i, place in enumerate(self.trained)}

    def trained_tree(self, leaves: Sequence[Any]) -> Params:
        """The trained leaves as a tree; see `partial_tree`."""
        return partial_tree(self.structure, self.trained, leaves)

    def owned_tree(self, leaves: Sequence[Any]) -> Params:
        """The owned leaves as a tree, as an optimizer sees it."""
        return partial_tree(self.structure, self.owned, leaves)


@dataclass(frozen=True)
class Roles:
    """The roles of a model's parameters.

    Attributes:
        frozen: their paths.
        owners: by path of each alias, its owner's, in order of declaration.
        first_trained: the first layer with a parameter that is trained; the number of layers if none is.
    """

    frozen: frozenset[str]
    owners: Mapping[str, str]
    first_trained: int

    @classmethod
    def of(
        cls,
        params: Params,
        frozen: Sequence[str] = (),
        tied: Sequence[tuple[str, str]] = (),
        constants: Collection[str] = (),
    ) -> Roles:
        """Resolve names and patterns.

        Args:
            params: specs of the whole model, {layer index as text: tree}.
            frozen: patterns of paths; in them and in `tied` a layer index below 0 counts from the end.
            tied: pairs of paths, owner and alias.
            constants: paths of parameters that are frozen whatever `frozen` says.

        Raises:
            UsageError: a pattern or path that there is not, nothing left to train, a parameter to train that
                has no gradient (whole numbers), a tie of parameters of different shape or dtype.
        """
        specs = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
        owners = _resolve_ties(specs, len(params), tied)
        matched = set(constants)
        for pattern in frozen:
            wanted = from_the_front(pattern, len(params))
            found = {path for path in specs if fnmatchcase(path, wanted)}
            if not found:
                raise UsageError(f"frozen={pattern!r} matches no parameter; there are {some_of(specs)}")
            matched |= found
        one = {path: owners.get(path, path) for path in specs}  # a tied parameter has several names
        names = {one[path] for path in matched}
        every = frozenset(path for path in specs if one[path] in names)
        if frozen and len(every) == len(specs):
            raise UsageError(f"frozen={list(frozen)} freezes every parameter: nothing is left to train")
        trained = [path for path in specs if path not in every]
        for path in trained:
            if not jnp.issubdtype(specs[path].dtype, jnp.inexact):
                raise UsageError(
                    f"parameter {path} is {specs[path].dtype}, which has no gradient: freeze it, "
                    f"frozen={path!r}, or make it a constant (a NumPy array)"
                )
        layers = [int(path.split(".")[0]) for path in trained]
        return cls(every, owners, min(layers, default=len(params)))

    def leaves(self, params: Params) -> LeafRoles:
        """The roles of the leaves of a tree of some layers, or its specs."""
        paths = leaf_paths(params)
        trained = tuple(i for i, path in enumerate(paths) if path not in self.frozen)
        owned = tuple(i for i in trained if paths[i] not in self.owners)
        counts = Counter(self.owners.values())
        owners = {i: counts[paths[i]] for i in owned if counts[paths[i]]}
        return LeafRoles(jax.tree.structure(params), trained, owned, owners)

    def trained(self, params: Params) -> list[list[str]]:
        """By layer of a whole model, the names of its trained parameters."""
        return [
            [path for path in leaf_paths({str(i): params[str(i)]}) if path not in self.frozen]
            for i in range(len(params))
        ]

    @property
    def ties(self) -> list[tuple[str, str]]:
        """Owner and alias of whatever is tied and trained, in order of declaration."""
        return [(owner, alias) for alias, owner in self.owners.items() if owner not in self.frozen]


def _resolve_ties(specs: Mapping[str, Any], layers: int, tied: Sequence[tuple[str, str]]) -> dict[str, str]:
    owners: dict[str, str] = {}
    for names in tied:
        owner, alias = (from_the_front(name, layers) for name in names)
        what = f"tied={{{names[0]!r}: {names[1]!r}}}"
        for path, name in ((owner, names[0]), (alias, names[1])):
            if path not in specs:
                raise UsageError(f"{what}: there is no parameter {name!r}; there are {some_of(specs, path)}")
        a, b = specs[owner], specs[alias]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise UsageError(
                f"{what}: the first is {a.dtype}{list(a.shape)}, the second {b.dtype}{list(b.shape)}; tied "
                f"parameters must be equal in shape and dtype: transpose inside a layer"
            )
        if owner == alias or alias in owners or owner in owners or alias in owners.values():
            raise UsageError(
                f"{what}: each parameter has one owner, which is no alias itself: give an owner with the "
                f"list of its aliases"
            )
        owners[alias] = owner
    return owners
