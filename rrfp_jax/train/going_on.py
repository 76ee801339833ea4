"""Whether a Trainer can go on from a checkpoint, told before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.checkpoint.folder import MANIFEST, CheckpointFolder
from rrfp_jax.checkpoint.format import Damaged
from rrfp_jax.checkpoint.leaves import OPTIMIZER, PARAMETERS, keyed, name_of
from rrfp_jax.checkpoint.saving import LeafSelection, mismatch_reason
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.run.world import START_SECONDS, World
from rrfp_jax.train.snapshot import check_seed, standing_of


@dataclass(frozen=True)
class Found:
    """A checkpoint that a run would go on from.

    Attributes:
        config: that was kept with it.
        refusal: why this Trainer cannot; empty if it can.
        steps: that were done; 0 if none that is there can be opened, which `restore` says.
    """

    config: Any = None
    refusal: str = ""
    steps: int = 0


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
    told = None if mine is None else [mine.config, mine.refusal, mine.steps]
    found = engine.world.gather("the checkpoint to go on from", told, START_SECONDS)[0]
    return None if found is None else Found(*found)


def _seen(engine: Engine, seed: int, folder: CheckpointFolder, step: int | None) -> Found | None:
    candidates = folder.steps() if step is None else [step]
    for candidate in reversed(candidates):
        try:
            run, leaves = folder.open(candidate, standing_of)
        except (Damaged, OSError):
            continue  # `restore` says so
        except UsageError as error:
            return Found(refusal=str(error))
        try:
            check_seed(run, seed)
        except UsageError as error:
            return Found(run.config, str(error))
        everything = LeafSelection(layers=len(engine.library.params))
        refusal = mismatch_reason(folder.final(candidate), run, leaves, _leaves(engine), everything)
        return Found(run.config, refusal, candidate)
    return Found() if candidates else None


def say_none(world: World, folder: Path, steps: int) -> None:
    """Say that a folder has no checkpoint, so that training begins with this step; all processes together.

    Raises:
        UsageError: it is there and has other things in it, so it was hardly meant.
    """
    reason = _other_folder(folder) if world.rank == 0 else ""
    if reason := world.gather("what is in the folder of checkpoints", reason, START_SECONDS)[0]:
        raise UsageError(reason)
    if world.rank == 0:
        say(f"no checkpoint in {folder}: training begins with step {steps}")


def _other_folder(folder: Path) -> str:
    """Why a folder without checkpoints is not one for them; empty if it can be."""
    try:
        names = CheckpointFolder(folder).other_things()
    except OSError as error:
        return f"{folder}: cannot be read: {error.strerror}"
    if not names:
        return ""
    if MANIFEST in names:
        return f"{folder} is itself a checkpoint: give restore() the folder that it is in, and its step"
    beside = Path(f"{folder}.checkpoints")
    remedy = f"did you mean {beside}?" if beside.is_dir() else "give a folder of checkpoints, or a new one"
    return f"{folder} has no checkpoint, but {printable(', '.join(names[:3]))}: {remedy}"


def _leaves(engine: Engine) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of all leaves that an update changes, of the whole model, by name."""
    leaves = keyed(engine.library.params, PARAMETERS) + keyed(engine.staging.optimizer_state, OPTIMIZER)
    return {name_of(key): (list(spec.shape), spec.dtype.name) for key, spec in leaves}
