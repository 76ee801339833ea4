"""A folder of checkpoints, `<step>/` each: what is complete, intact, too old, or was never finished.

A checkpoint is written in `.<step>.saving` and then renamed, so it is there in full or not at all. Its
`rrfp.json`, written last, has the size and checksum of every other file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rrfp_jax.checkpoint.orbax_files import METADATA, Damaged, Leaf, read_file, tree_metadata, write_file
from rrfp_jax.errors import UsageError
from rrfp_jax.files import move_away

MANIFEST = "rrfp.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run needs besides its arrays to go on as if it had never stopped; plain data.

    Attributes:
        step: steps done, hence the number of the next one, from which its random keys follow.
        data: the position in the data, as the data sees it.
        seed: of initial values, random keys and data order.
        standing: how training stands otherwise (loss scale, steps left out).
        config: of the run.
        plan_hash: of the last step's microbatches.
    """

    step: int
    data: Any = None
    seed: int = 0
    standing: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    plan_hash: str = ""


class CheckpointFolder:
    """The checkpoints in a folder, as one process sees them.

    Args:
        path: of the folder; made when the first checkpoint is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        with suppress(OSError):
            return sorted(int(path.name) for path in self.path.iterdir() if path.name.isdecimal())
        return []

    def final(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.path / str(step)

    def staging(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.path / f".{step}.saving"

    def tidy(self) -> list[Path]:
        """Remove checkpoints whose writing, or removal, was broken off; those of the first kind."""
        unfinished = sorted(self.path.glob(".*.saving"))
        for path in (*unfinished, *self.path.glob(".*.removed")):
            self.discard(path)
        return unfinished

    def commit(self, run: RunState, leaves: Mapping[str, Leaf], keep: int) -> None:
        """Make a checkpoint visible whose leaves have all been written, and remove the oldest.

        Later ones, of a run that has gone back since, are renamed: they are not its successors.

        Args:
            run: its state.
            leaves: of all processes, by name.
            keep: how many checkpoints are to be left.

        Raises:
            OSError: it cannot be written, or leaves are not where they should be.
        """
        staging, final = self.staging(run.step), self.final(run.step)
        for leaf in leaves.values():
            for path, (size, _) in leaf["files"].items():
                if (staging / path).stat().st_size != size:
                    raise OSError(errno.EIO, "not as its rank wrote it; do all share it?", staging / path)
        metadata = tree_metadata([tuple(leaf["key"]) for leaf in leaves.values()], asdict(run))
        content = {"files": {METADATA: write_file(staging / METADATA, metadata)}, "leaves": leaves}
        sealed = {"crc32": _checksum(content), "content": content}
        write_file(staging / MANIFEST, json.dumps(sealed).encode())
        if final.exists():
            _remove(final)
        staging.rename(final)
        _sync(self.path)
        for step in self.steps():
            if step > run.step:
                move_away(self.final(step))
        for step in self.steps()[:-keep]:
            _remove(self.final(step))

    def discard(self, path: Path) -> None:
        """Remove what there is of an unfinished checkpoint, if that is possible."""
        shutil.rmtree(path, ignore_errors=True)

    def open(self, step: int) -> tuple[RunState, Mapping[str, Leaf]]:
        """A checkpoint's state, and its leaves by name.

        Raises:
            Damaged: the manifest or the metadata are not as they were written.
            UsageError: a later version wrote it, and keeps more than this one knows.
        """
        manifest = self.final(step) / MANIFEST
        intact = False
        try:
            sealed = json.loads(manifest.read_bytes())
            intact = sealed["crc32"] == _checksum(sealed["content"])
        except OSError as error:
            raise Damaged(f"{manifest} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError):
            pass
        if not intact:
            raise Damaged(f"{manifest} is not as it was written")
        content = sealed["content"]
        size, checksum = content["files"][METADATA]
        metadata = bytearray(size)
        read_file(self.final(step) / METADATA, checksum, memoryview(metadata))
        state = json.loads(metadata)["custom_metadata"]
        if unknown := sorted(state.keys() - {item.name for item in fields(RunState)}):
            raise UsageError(
                f"{self.final(step)} has {', '.join(unknown)}, which this version of rrfp_jax does not know: "
                f"go on with the version that wrote it"
            )
        return RunState(**state), content["leaves"]


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint such that it is never seen in part."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):
        checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
