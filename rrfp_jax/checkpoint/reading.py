"""Checkpoints as one process reads them that has no part in the run which wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.checkpoint.folder import MANIFEST, STEP, CheckpointFolder
from rrfp_jax.checkpoint.leaves import Key
from rrfp_jax.checkpoint.manifest import LeafRecord, RunState
from rrfp_jax.checkpoint.small_files import Damaged
from rrfp_jax.checkpoint.zarr_files import read_leaf
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of
from rrfp_jax.printing import say


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint, of which nothing but its small files has been read.

    Attributes:
        folder: its own.
        run: the state of the run.
        leaves: by key.
    """

    folder: Path
    run: RunState
    leaves: Mapping[Key, LeafRecord]

    def array(self, key: Key) -> np.ndarray[Any, Any]:
        """A whole array.

        Raises:
            Damaged: a file is not as it was written.
        """
        return np.asarray(read_leaf(self.folder, self.leaves[key]))


def intact(what: str, given: str | PathLike[str], step: int | None = None) -> Iterator[Stored]:
    """The checkpoints of a folder whose small files are intact, the latest first.

    Args:
        what: the folder is for, as a sentence about it begins.
        given: the folder of a run's checkpoints, or that of one of them.
        step: of the only one that is wanted.

    Raises:
        UsageError: there are none, or none of that step.
    """
    if not isinstance(given, (str, PathLike)):
        raise UsageError(f"{what}({given!r}): give a folder of checkpoints, such as 'runs/checkpoints'")
    path = path_of(f"{what}: folder", given)
    if STEP.fullmatch(path.name) and (path / MANIFEST).exists():
        path, step = path.parent, int(path.name)
    folder = CheckpointFolder(path)
    steps = [own for own in folder.steps() if step in (None, own)]
    if not steps:
        known = ", ".join(map(str, folder.steps()))
        of = f"no checkpoint of step {step}" if step is not None and known else "no checkpoint"
        raise UsageError(
            f"{what}({str(given)!r}): {of} is there; "
            + (f"there are: {known}" if known else "give the folder that they were saved to")
        )
    for own in reversed(steps):
        try:
            run, leaves = folder.open(own)
        except Damaged as error:
            say(f"the checkpoint {folder.final(own)} is refused: {error}")
        else:
            yield Stored(folder.final(own), run, {leaf.key: leaf for leaf in leaves.values()})
