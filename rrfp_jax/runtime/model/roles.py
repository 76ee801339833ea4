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
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import counted
from rrfp_jax.random_keys import is_key
from rrfp_jax.runtime.model.layers import Params

_NAMES_SHOWN = 5


def leaf_path(layer: int | str, path: Sequence[Any]) -> str:
    """The name of a parameter: layer index, then the keys to the leaf, with dots."""
    return ".".join(filter(None, [str(layer), jax.tree_util.keystr(tuple(path), simple=True, separator=".")]))


def leaf_paths(params: Params) -> list[str]:
    """The names of all parameters of {layer index as text: tree}, in leaf order."""
    return [leaf_path(path[0].key, path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def from_the_front(name: str, layers: int) -> str:
    """A path or pattern whose layer index, if below 0, is counted from the front."""
    layer, dot, rest = name.partition(".")
    return f"{int(layer) + layers}{dot}{rest}" if layer.startswith("-") and layer[1:].isdigit() else name


def covering(names: Collection[str], others: Collection[str]) -> list[str]:
    """Few and short patterns that match these paths, and none of the others."""
    parts = [name.split(".") for name in names]
    wider = {f"{'.'.join(own[:i])}.*" for own in parts for i in range(1, len(own))}
    wider |= {f"*.{'.'.join(own[i:])}" for own in parts for i in range(1, len(own))}
    fits = [pattern for pattern in wider if not any(fnmatchcase(other, pattern) for other in others)]
    matched = {pattern: {name for name in names if fnmatchcase(name, pattern)} for pattern in fits}
    matched |= {name: {name} for name in names}
    left, found = set(names), list[str]()
    while left:
        found.append(max(matched, key=lambda own: (len(matched[own] & left), own in names, -len(own), own)))
        left -= matched[found[-1]]
    return found


def matching(setting: str, pattern: str, paths: Collection[str], layers: int) -> set[str]:
    """The paths that a pattern of a setting matches; refuses one that matches none."""
    wanted = from_the_front(pattern, layers)
    if found := {path for path in paths if fnmatchcase(path, wanted)}:
        return found
    raise UsageError(f"{setting} matches no parameter; there are {_some_of(paths)}")


def _some_of(paths: Collection[str], near: str = "") -> str:
    """Some of the names as text, those of the same layer as `near` first."""
    layer = near.partition(".")[0]
    names = sorted(paths, key=lambda path: path.partition(".")[0] != layer)
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


@dataclass(frozen=True)
class LeafRoles:
    """The roles of the leaves of {layer index as text: tree}, by their places in its flat list."""

    structure: Any
    trained: tuple[int, ...]  # those that are owned, and aliases
    owned: tuple[int, ...]
    owners: Mapping[int, int]  # owned leaves that have aliases, with their number

    @cached_property
    def aliases(self) -> tuple[int, ...]:
        """Places of the leaves whose owner is another one."""
        return tuple(sorted({*self.trained} - {*self.owned}))

    @cached_property
    def number(self) -> Mapping[int, int]:
        """The index of each trained leaf, given by place, among the trained ones."""
        return {place: i for i, place in enumerate(self.trained)}

    def tree(self, places: Sequence[int], leaves: Sequence[Any]) -> Params:
        """A tree with leaves at some places only: plain dicts lose the other keys, others have None."""
        own = dict(zip(places, leaves, strict=True))
        count = self.structure.num_leaves
        tree = jax.tree.unflatten(self.structure, [own.get(place) for place in range(count)])
        return tree if len(own) == count else _without_gaps(tree) or {}


def _without_gaps(tree: Any) -> Any:
    if type(tree) is not dict:  # an OrderedDict's leaves are in another order
        return tree
    filled = {key: _without_gaps(value) for key, value in tree.items()}
    kept = {key: value for key, value in filled.items() if value is not None}
    return kept if kept or not tree else None


@dataclass(frozen=True)
class Roles:
    """Paths of a model's frozen parameters, and of aliases with their owners in order of declaration."""

    frozen: frozenset[str]
    owners: Mapping[str, str]

    @classmethod
    def of(
        cls,
        params: Params,
        frozen: Sequence[str] = (),
        tied: Sequence[tuple[str, str]] = (),
        constants: Collection[str] = (),
    ) -> Roles:
        """Resolve the names and patterns of a `Pipeline`; `constants` are frozen whatever `frozen` says."""
        specs = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
        owners = _resolve_ties(specs, len(params), tied)
        named = (matching(f"frozen={pattern!r}", pattern, specs, len(params)) for pattern in frozen)
        matched = set(constants).union(*named)
        one = {path: owners.get(path, path) for path in specs}  # a tied parameter has several names
        names = {one[path] for path in matched}
        every = frozenset(path for path in specs if one[path] in names)
        if frozen and len(every) == len(specs):
            raise UsageError(f"frozen={list(frozen)} freezes every parameter: nothing is left to train")
        for path, spec in specs.items():
            if is_key(spec):
                raise UsageError(
                    f"parameter {path} is a random key, {spec.dtype}: keep its numbers, "
                    f"jax.random.key_data(key), frozen, or draw from mb.key"
                )
            if jnp.issubdtype(spec.dtype, np.number) and jax.dtypes.itemsize_bits(spec.dtype) < 8:
                raise UsageError(
                    f"parameter {path} is {spec.dtype}, which JAX's compiled programs do not take: keep it "
                    f"in 8 bits, such as int8, and convert it in the layer: .astype({spec.dtype.name!r})"
                )
            if path not in every and not jnp.issubdtype(spec.dtype, jnp.inexact):
                raise UsageError(
                    f"parameter {path} is {spec.dtype}, which has no gradient: freeze it, "
                    f"frozen={path!r}, or make it a constant (a NumPy array)"
                )
        return cls(every, owners)

    def leaves(self, params: Params) -> LeafRoles:
        """The roles of the leaves of a tree of some layers, or its specs."""
        paths = leaf_paths(params)
        trained = tuple(i for i, path in enumerate(paths) if path not in self.frozen)
        owned = tuple(i for i in trained if paths[i] not in self.owners)
        counts = Counter(self.owners.values())
        owners = {i: counts[paths[i]] for i in owned if counts[paths[i]]}
        return LeafRoles(jax.tree.structure(params), trained, owned, owners)

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
                raise UsageError(f"{what}: there is no parameter {name!r}; there are {_some_of(specs, path)}")
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


def layers_of_chunks(layers: int, placement: Placement, split: Sequence[int] | None) -> list[list[range]]:
    """By stage, the layers of each of its chunks; refuses too few, and a split that does not add up."""
    virtual_stages, what, many = placement.last + 1, "stage", counted(placement.stages, "stage")
    fix = f"at most {layers}"
    if (chunks := placement.chunks) > 1:
        what, many, one = "chunk", f"{chunks} chunks on each of {many}", "one chunk per stage, as with bf"
        fix = f"at most {counted(layers // chunks, 'stage')}, or {one}" if layers >= chunks else one
    if virtual_stages > layers:
        raise UsageError(f"{many} for {counted(layers, 'layer')}: each {what} needs at least one; use {fix}")
    if split is None:
        split = split_evenly(layers, virtual_stages)
    whole = all(isinstance(size, (int, np.integer)) for size in split)
    if not whole or len(split) != virtual_stages or sum(split) != layers or min(split) < 1:
        raise UsageError(
            f"split={list(split)}: give {virtual_stages} positive whole numbers of layers, one per {what}, "
            f"in the model's order, that add up to {layers}"
        )
    ranges = [range(end - size, end) for end, size in zip(accumulate(split), split, strict=True)]
    return [[ranges[placement.virtual_stage(s, c)] for c in range(chunks)] for s in range(placement.stages)]


def split_evenly(layers: int, stages: int) -> list[int]:
    """Numbers of layers per stage that differ by at most one; the longer stages stand at the ends.

    The first and the last layer are usually an embedding and a head, cheaper than the blocks between them:
    embedding, 8 blocks and head on 4 stages give 3, 2, 2, 3, so that each stage has 2 blocks.
    """
    short, longer = divmod(layers, stages)
    from_ends = sorted(range(stages), key=lambda s: min(s, stages - 1 - s))
    return [short + (s in from_ends[:longer]) for s in range(stages)]
