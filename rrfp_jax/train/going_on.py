"""Whether a Trainer can go on from a checkpoint, told before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.leaves import keyed, name_of
from rrfp_jax.checkpoint.orbax_files import Damaged
from rrfp_jax.checkpoint.restoring import misfits_of, of_another
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.processes.world import START_SECONDS
from rrfp_jax.train.snapshot import OPTIMIZER, PARAMETERS, check_seed, standing_of


@dataclass(frozen=True)
class Found:
    """A checkpoint that a run would go on from.

    Attributes:
        config: that was kept with it.
        refusal: why this Trainer cannot; empty if it can.
    """

    config: Any
    refusal: str


def look_at(engine: Engine, seed: int, folder: Path, step: int | None) -> Found | None:
    """The checkpoint that would be restored, as rank 0 sees it; all processes ask together.

    Its small files are read, not its leaves: one that is damaged there may yet be passed over.

    Args:
        engine: which has examined a bucket.
        seed: of the run.
        folder: of the checkpoints.
        step: of one of them; None for the latest that can be opened.

    Returns:
        None if there is none.
    """
    mine = _seen(engine, seed, CheckpointFolder(folder), step) if engine.world.rank == 0 else None
    told = None if mine is None else [mine.config, mine.refusal]
    found = engine.world.gather("the checkpoint to go on from", told, START_SECONDS)[0]
    return None if found is None else Found(*found)


def _seen(engine: Engine, seed: int, folder: CheckpointFolder, step: int | None) -> Found | None:
    for candidate in reversed(folder.steps() if step is None else [step]):
        try:
            run, leaves = folder.open(candidate, standing_of)
        except (Damaged, OSError):
            continue  # `restore` says so
        except UsageError as error:
            return Found(None, str(error))
        try:
            check_seed(run, seed)
        except UsageError as error:
            return Found(run.config, str(error))
        misfits = misfits_of(leaves, _leaves(engine))
        return Found(
            run.config, of_another("model or optimizer", folder.final(candidate), misfits) if misfits else ""
        )
    return None


def _leaves(engine: Engine) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of all leaves that an update changes, of the whole model, by name."""
    leaves = keyed(engine.library.params, PARAMETERS) + keyed(engine.optimizer_state, OPTIMIZER)
    return {name_of(key): (list(spec.shape), spec.dtype.name) for key, spec in leaves}
