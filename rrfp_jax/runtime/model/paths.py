"""Parameters by name, and trees of some parameters only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.runtime.model.layers import Params

NAMES_SHOWN = 5


def leaf_path(layer: int | str, path: Sequence[Any]) -> str:
    """The name of a parameter: layer index, then the keys to the leaf, with dots."""
    return ".".join(filter(None, [str(layer), jax.tree_util.keystr(tuple(path), simple=True, separator=".")]))


def leaf_paths(params: Params) -> list[str]:
    """The names of all parameters of {layer index as text: tree}, in leaf order."""
    return [leaf_path(path[0].key, path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def partial_tree(structure: Any, places: Sequence[int], leaves: Sequence[Any]) -> Params:
    """A tree of this structure with the leaves at some places only.

    Dicts lose the keys of the others, so that what walks through such a tree (a mask as a function of the
    parameters) meets no gap; other containers have None there.
    """
    if len(places) == structure.num_leaves:
        return jax.tree.unflatten(structure, leaves)
    full: list[Any] = [None] * structure.num_leaves
    for place, leaf in zip(places, leaves, strict=True):
        full[place] = leaf
    return _without_gaps(jax.tree.unflatten(structure, full)) or {}


def _without_gaps(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    filled = {key: _without_gaps(value) for key, value in tree.items()}
    kept = {key: value for key, value in filled.items() if value is not None}
    return kept if kept or not tree else None


def from_the_front(name: str, layers: int) -> str:
    """A path or pattern whose layer index, if below 0, is counted from the front."""
    layer, dot, rest = name.partition(".")
    return f"{int(layer) + layers}{dot}{rest}" if layer.startswith("-") and layer[1:].isdigit() else name


def some_of(specs: Mapping[str, Any], near: str = "") -> str:
    """Some of the names as text, those of the same layer as `near` first."""
    layer = near.partition(".")[0]
    names = sorted(specs, key=lambda path: path.partition(".")[0] != layer)
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
