"""Reading a checkpoint's leaves, as far as this process's devices have them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rrfp_jax.checkpoint.leaves import PARAMETERS, Key, name_of
from rrfp_jax.checkpoint.manifest import METADATA, LeafRecord, RunState
from rrfp_jax.checkpoint.parts import Parts, places_here
from rrfp_jax.checkpoint.zarr_files import read_leaf

FILES_AT_ONCE = 8
"""Arrays that are read or written at once: a disk serves several requests to sync in the time of one."""

EXAMPLES = 2
"""Leaves that a message names."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint, as far as this process has asked for it."""

    folder: Path
    run: RunState
    leaves: Mapping[Key, Parts]


@dataclass(frozen=True, kw_only=True)
class LeafSelection:
    """What of a checkpoint is wanted.

    Attributes:
        root: what the keys of leaves must begin with, such as "params"; None for all leaves.
        sources: keys of leaves that are to have the values of others, such as aliases of tied parameters.
        layers: of the model that they are for, for messages; None if that is not known.
    """

    root: str | None = None
    sources: Mapping[Key, Key] = field(default_factory=dict)
    layers: int | None = None

    def of(self, leaves: Mapping[str, LeafRecord]) -> Mapping[str, LeafRecord]:
        """The leaves below the root."""
        return {name: leaf for name, leaf in leaves.items() if self.root in (None, leaf.key[0])}


def read_all(
    folder: Path, leaves: Mapping[str, LeafRecord], wanted: Mapping[Key, Any], only: LeafSelection
) -> dict[Key, Parts]:
    """The wanted leaves.

    Args:
        folder: of the checkpoint.
        leaves: all that it has, by name.
        wanted: specs (shape, dtype, sharding) of those to be read.
        only: where their values are.

    Raises:
        Damaged: a file is not as it was written.
    """
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        sources = [leaves[name_of(only.sources.get(key, key))] for key in wanted]
        arrays = pool.map(lambda leaf, spec: _read_like(folder, leaf, spec), sources, wanted.values())
        return dict(zip(wanted, arrays, strict=True))


def _read_like(folder: Path, leaf: LeafRecord, spec: Any) -> Parts:
    """Of a stored array, what this process's devices have of it."""
    if spec.sharding is None:
        return read_leaf(folder, leaf)
    return read_leaf(folder, leaf, spec.sharding.shard_shape(spec.shape), places_here(spec))


def misfits_of(leaves: Mapping[str, LeafRecord], everything: Mapping[str, Any]) -> list[str]:
    """How the leaves of a checkpoint differ from those wanted, as sentences."""
    there = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}
    here = {name: f"{dtype}{shape}" for name, (shape, dtype) in everything.items()}
    found = [f"it lacks {name}" for name in here if name not in there]
    found += [f"its {name} is not in the model" for name in there if name not in here]
    other = [name for name in here if name in there and here[name] != there[name]]
    return found + [f"its {name} is {there[name]} instead of {here[name]}" for name in other]


def refusal_of(
    folder: Path,
    run: RunState,
    leaves: Mapping[str, LeafRecord],
    everything: Mapping[str, Any],
    only: LeafSelection,
) -> str:
    """Why a checkpoint has other leaves than those wanted; empty if it has the same.

    Args:
        folder: of the checkpoint.
        run: its state.
        leaves: all that it has, by name.
        everything: shape and dtype of all that are wanted, by name.
        only: where their values are.
    """
    misfits = misfits_of(only.of(leaves), everything)
    if not misfits:
        return ""
    params = {name: spec for name, spec in everything.items() if name.partition(".")[0] == PARAMETERS}
    of_params = misfits_of(LeafSelection(root=PARAMETERS).of(leaves), params)
    what, cause, remedy = "model", "the parameters differ", ""
    if not of_params:
        what, cause = "optimizer", "the parameters fit, the optimizer's state does not"
        remedy = "; for the parameters alone: restore(folder, params_only=True)"
    elif run.layers and only.layers not in (None, len(run.layers)):
        cause = f"the checkpoint has {len(run.layers)} layers, this model {only.layers}"
    examples = of_params or misfits
    more = f"; and {len(examples) - EXAMPLES} more" if len(examples) > EXAMPLES else ""
    return (
        f"{folder} is of another {what}: {cause} ({'; '.join(examples[:EXAMPLES])}{more}){remedy}; "
        f"{METADATA} in it has the config that it was saved with"
    )
