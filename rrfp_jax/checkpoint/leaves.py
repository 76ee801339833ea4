"""Names of the leaves of parameters and optimizer state, whichever stage has which layers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable
from rrfp_jax.random_keys import as_key, is_key, plain, plain_spec

PARAMETERS, OPTIMIZER = "params", "optimizer"
"""What the keys of leaves begin with."""

LONGEST_NAME = 255
"""Bytes of a folder's name that file systems take."""

Key: TypeAlias = tuple[str, ...]
"""The way to a leaf, such as ("params", "3", "attention", "query") or ("optimizer", "0", "count").

A stage's parameters are a tree by layer, and an optimizer's state holds trees like it, so the layer is in the
key of whatever belongs to one: ("optimizer", "0", "mu", "3", "attention", "query"). What belongs to none,
such as a count of steps, has the same key on every stage, and the same value.
"""


def name_of(key: Key) -> str:
    """A key as messages have it: "params.3.attention.query"."""
    return ".".join(key)


def folder_name(name: str) -> str:
    """The name of a leaf's folder, in which a slash is "%2F" and a percent sign "%25"."""
    return name.replace("%", "%25").replace("/", "%2F")


def keyed(tree: Any, *prefix: str) -> list[tuple[Key, Any]]:
    """The leaves of a tree of arrays or specs, with their keys; typed random keys as plain numbers.

    Raises:
        UsageError: two leaves have the same name, or one has a name that no folder can have.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = [(_key(prefix, path), _numbers(leaf)) for path, leaf in leaves]
    counted = Counter(name_of(key) for key, _ in found)
    for name, count in counted.items():
        wrong = why_unstorable(name) or (f"is that of {count} leaves" if count > 1 else "")
        if wrong:
            raise UsageError(
                f"the name {printable(name)} {wrong}, so it cannot be stored: rename the parameter"
            )
    return found


def why_unstorable(name: str) -> str:
    """Why no folder can be named after a leaf, as the end of a sentence; empty if one can."""
    if name in ("", ".", ".."):
        return "is no name of a folder"
    if not name.isprintable():
        return "has a character that cannot be printed"
    length = len(os.fsencode(folder_name(name)))
    return f"has {length} bytes, of which a folder takes {LONGEST_NAME}" if length > LONGEST_NAME else ""


def filled(specs: Any, leaves: Mapping[Key, Any], *prefix: str) -> Any:
    """A tree like `specs` with the leaves of these keys; the inverse of `keyed`."""
    return jax.tree_util.tree_map_with_path(lambda path, spec: _like(spec, leaves[_key(prefix, path)]), specs)


def plain_key(entry: Any) -> int | str:
    """An entry of a path as plain data: whole numbers, as of lists, stay such."""
    key = getattr(entry, "key", getattr(entry, "idx", None))
    return key if type(key) is int else jax.tree_util.keystr((entry,), simple=True)


def _key(prefix: Key, path: tuple[Any, ...]) -> Key:
    return (*prefix, *(jax.tree_util.keystr((entry,), simple=True) for entry in path))


def _numbers(leaf: Any) -> Any:
    return plain(leaf) if isinstance(leaf, jax.Array) else plain_spec(leaf)


def _like(spec: Any, leaf: Any) -> Any:
    return as_key(spec, jax.device_put(np.asarray(leaf))) if is_key(spec) else leaf
