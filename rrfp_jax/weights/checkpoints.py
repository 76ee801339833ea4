"""Initial parameters from checkpoints: of another run of ours, or of whoever wrote one with orbax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from rrfp_jax.checkpoint.folder import readable_checkpoints
from rrfp_jax.checkpoint.format import Damaged
from rrfp_jax.checkpoint.leaves import PARAMETERS
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import AnyPath, path_of
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.weights.tensors import FromTensors, NameMap, check_names

VALUE = ".value"
"""What the names of an `nnx.State`'s arrays end in, as orbax stores it; they may be given without it."""


def checkpoint(
    folder: AnyPath, names: NameMap = lambda path: path, *, step: int | None = None
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


def orbax(folder: AnyPath, names: NameMap = lambda path: path) -> InitFunction:
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
    paths, read = _orbax_reader(path)
    return FromTensors(names, paths, str(path), read)


def _orbax_reader(folder: Path) -> tuple[Mapping[str, Any], Callable[[str], np.ndarray[Any, Any]]]:
    """The ways to the arrays of an item that orbax has saved, by name, and what reads the one of a name."""
    import orbax.checkpoint as ocp  # here, since it takes a second

    # The handler alone: a Checkpointer has all processes meet at every array, of which each reads others.
    handler, lock = ocp.PyTreeCheckpointHandler(), Lock()
    try:
        metadata = handler.metadata(folder)
    except Exception as error:
        found = [item for pattern in ("*", "*/*") for item in folder.glob(f"{pattern}/_METADATA")]
        items = ", ".join(sorted(str(item.parent) for item in found))
        inside = f"it has items, give one: {items}" if items else str(error).splitlines()[0]
        raise UsageError(f"{folder}: no arrays that orbax has saved: {inside}") from None
    tree = getattr(metadata, "tree", metadata)
    leaves = tree_leaves_with_path(tree)
    names = [keystr(path, simple=True, separator=".") for path, _ in leaves]
    if double := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"{folder}: two arrays have the name {double[0]!r}, as keys with dots have")
    paths = {name: path for name, (path, _) in zip(names, leaves, strict=True)}
    paths = {**{name.removesuffix(VALUE): path for name, path in paths.items()}, **paths}

    def read(name: str) -> np.ndarray[Any, Any]:
        wanted = paths[name]
        item = tree_map_with_path(lambda path, leaf: 0 if path == wanted else ocp.PLACEHOLDER, tree)
        how = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        asked = ocp.args.PyTreeRestore(item=item, restore_args=how)
        try:
            with lock:  # whoever calls from another thread waits
                found = handler.restore(folder, args=asked)
        except Exception as error:
            raise UsageError(f"{folder}: {name!r} cannot be read by orbax: {error}") from error
        return np.asarray(next(leaf for path, leaf in tree_leaves_with_path(found) if path == wanted))

    return paths, read
