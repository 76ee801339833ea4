"""Whether all ranks write to the same folder: rank 0 leaves a mark there, and the others look for it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.files import is_seen
from rrfp_jax.runtime.run.alike import who
from rrfp_jax.runtime.run.world import START_SECONDS, World


def require_shared(world: World, folder: Path) -> None:
    """UsageError, for all processes together, if a rank does not see what rank 0 writes into a folder.

    A folder that rank 0 cannot write passes: saving says more about that.
    """
    sees = seen_by(world, folder)
    blind = [rank for rank, seen in enumerate(sees) if not seen]
    if blind and sees[0]:
        raise UsageError(
            f"{folder.absolute()}: {who(blind, world.hosts)} cannot see what rank 0 writes there on "
            f"{world.hosts[0]}, so no checkpoint could be completed: name a folder that all nodes share, for "
            f"a config with --config.directory=FOLDER"
        )


def seen_by(world: World, folder: Path, limit: float = START_SECONDS) -> Sequence[bool]:
    """By rank whether it sees what rank 0 writes into a folder; nobody does if rank 0 cannot write.

    All processes ask together. Nothing is left there.
    """
    mark, made = "", list[Path]()
    try:
        if world.rank == 0:
            made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                name = f".seen-{secrets.token_hex(8)}"
                (folder / name).touch()
                mark = name
        mark = world.gather("a mark in a folder", mark, limit)[0]
        return world.gather("who sees that mark", bool(mark) and is_seen(folder / mark), limit)
    finally:
        with suppress(OSError):
            if mark and world.rank == 0:
                (folder / mark).unlink()
            for parent in made:
                parent.rmdir()
