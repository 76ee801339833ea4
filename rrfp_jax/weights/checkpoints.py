"""Initial parameters from checkpoints: of another run of ours, or of whoever wrote one with orbax."""

from __future__ import annotations

from collections import Counter
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np

from rrfp_jax.checkpoint.folder import readable_checkpoints
from rrfp_jax.checkpoint.format import Damaged
from rrfp_jax.checkpoint.leaves import PARAMETERS
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.weights.tensors import FromTensors, NameMap, check_names

VALUE = ".value"
"""What the names of an `nnx.State`'s arrays end in, as orbax stores it; they may be given without it."""


def checkpoint(
    folder: str | PathLike[str], names: NameMap = lambda path: path, *, step: int | None = None
) -> InitFunction:
    """The `init` of a `Trainer` that takes parameters from another run's checkpoint.

        Trainer(pipe, optax.adamw(1e-5), data=..., init=rrfp.weights.checkpoint("runs/base.checkpoints"))

    Args:
        folder: of that run's checkpoints, or one of them, such as "runs/base.checkpoints/400".
        names: which of its parameters each one here takes, such as "3.attention.query"; by default that of
            the same name. None keeps the layer's own value, as for a new head:
            `lambda path: None if path.startswith("13.") else path`.
        step: of the checkpoint; None for the latest. It is chosen now: give it if that run still saves.

    Raises:
        UsageError: there is no checkpoint. So does the function that is returned, see `pretrained`.
        TrainingError: there are only damaged ones, or that of the step is.
    """
    check_names(names)
    stored = next(readable_checkpoints("weights.checkpoint", folder, step))
    keys = {".".join(key[1:]): key for key in stored.leaves if key[0] == PARAMETERS}

    def read(name: str) -> np.ndarray[Any, Any]:
        try:
            return stored.array(keys[name])
        except Damaged as error:
            raise UsageError(f"{error}; give weights.checkpoint the step= of another one") from None

    base = stored.run.base
    left_out = "" if base is None else f" (which leaves out what was read from {' and '.join(base.files)})"
    return FromTensors(names, keys, f"{stored.folder}{left_out}", read)


def orbax(folder: str | PathLike[str], names: NameMap = lambda path: path) -> InitFunction:
    """The `init` of a `Trainer` that takes parameters from a checkpoint that was written with orbax.

    Orbax reads it, array by array: each process only those of its own stages.

        def names(path):  # of our parameters, such as "3.attention.query"
            layer, _, name = path.partition(".")
            return f"params.blocks.{layer}.{name}"

        init = rrfp.weights.orbax("/models/base/default", names)

    Args:
        folder: with the arrays of one item: what `StandardCheckpointer` or `PyTreeCheckpointer` has saved, or
            a `CheckpointManager`'s `<step>/default`; of flax NNX, Linen, or anything else.
        names: the stored array of each parameter, by the keys that lead to it with dots; or a `Tensor`
            with a transform. Those of an `nnx.State` end in ".value", which may be left out.

    Raises:
        UsageError: it is no such folder. So does the function that is returned, see `pretrained`.
    """
    check_names(names)
    path = path_of("weights.orbax: folder", folder).absolute()
    reader = _OrbaxReader(path)
    return FromTensors(names, reader.paths, str(path), reader.read)


class _OrbaxReader:
    """Reads arrays of an item that orbax has saved, one at a time, by names that lead to their `paths`."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp  # here, since it takes a second

        self._ocp, self._folder, self._lock = ocp, folder, Lock()
        # The handler alone: a Checkpointer has all processes meet at every array, of which each reads others.
        self._handler = ocp.PyTreeCheckpointHandler()
        try:
            metadata = self._handler.metadata(folder)
        except Exception as error:
            found = [item for pattern in ("*", "*/*") for item in folder.glob(f"{pattern}/_METADATA")]
            items = ", ".join(sorted(str(item.parent) for item in found))
            inside = f"it has items, give one: {items}" if items else str(error).splitlines()[0]
            raise UsageError(f"{folder}: no arrays that orbax has saved: {inside}") from None
        self._tree = getattr(metadata, "tree", metadata)
        leaves = jax.tree_util.tree_leaves_with_path(self._tree)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        paths = {name: path for name, (path, _) in zip(names, leaves, strict=True)}
        self.paths = {**{name.removesuffix(VALUE): path for name, path in paths.items()}, **paths}
        if double := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"{folder}: two arrays have the name {double[0]!r}, as keys with dots have")

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One array; whoever calls from another thread waits."""
        wanted, ocp = self.paths[name], self._ocp
        item = jax.tree_util.tree_map_with_path(
            lambda path, leaf: 0 if path == wanted else ocp.PLACEHOLDER, self._tree
        )
        how = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), self._tree)
        try:
            with self._lock:
                found = self._handler.restore(
                    self._folder, args=ocp.args.PyTreeRestore(item=item, restore_args=how)
                )
        except Exception as error:
            raise UsageError(f"{self._folder}: {name!r} cannot be read by orbax: {error}") from error
        leaves = jax.tree_util.tree_leaves_with_path(found)
        return np.asarray(next(leaf for path, leaf in leaves if path == wanted))
