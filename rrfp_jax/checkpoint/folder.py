"""A folder of checkpoints, `<step>/` each: what is complete, intact, too old, or was never finished.

A checkpoint is written in `.<step>.saving` and then renamed, so it is there in full or not at all. An earlier
one of the same step is `.<step>.replaced` between the two renames, and is found there. The file `rrfp.json`,
written last, has the size and checksum of the other small file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rrfp_jax.checkpoint.format import (
    METADATA,
    Content,
    Damaged,
    Files,
    LeafRecord,
    LeafRecords,
    Metadata,
    RunState,
    Sealed,
    StateCheck,
    content_of,
    files_of,
    read_file,
    read_leaf,
    run_state,
    tree_metadata,
    write_file,
)
from rrfp_jax.checkpoint.leaves import Key
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import AnyPath, path_of, printable
from rrfp_jax.files import move_away, sync
from rrfp_jax.json_files import as_kind, load_json, parse_json
from rrfp_jax.printing import say

MANIFEST = "rrfp.json"

STEP = re.compile("0|[1-9][0-9]{0,17}")
"""The name of a checkpoint: its step, in one way only."""

REPLACED = re.compile(rf"\.({STEP.pattern})\.replaced")
"""The name of a checkpoint while a new one of its step takes its place; it stays if a process dies then."""


class CheckpointFolder:
    """The checkpoints in a folder, as one process sees them; the folder is made when the first is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order; none of a folder that cannot be read."""
        with suppress(UsageError):
            return self.candidates()
        return []

    def candidates(self, step: int | None = None) -> list[int]:
        """The same, or the given step alone; `UsageError`: it is not there, or the folder cannot be read.

        A folder of others may be called like a checkpoint.
        """
        try:
            paths = [path for path in self.path.iterdir() if os.path.lexists(path / MANIFEST)]
        except (FileNotFoundError, NotADirectoryError):
            paths = []
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from None
        found = (STEP.fullmatch(path.name) or REPLACED.fullmatch(path.name) for path in paths)
        steps = sorted({int(name[name.lastindex or 0]) for name in found if name})
        if step not in (None, *steps):
            known = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"{self.path}: no checkpoint of step {step}; there are: {known}")
        return steps if step is None else [step]

    def none_intact(self, step: int | None = None) -> str:
        """What is said where all checkpoints are damaged, or that of the wanted step."""
        if step is None:
            return "no checkpoint is intact"
        others = ", ".join(str(own) for own in self.steps() if own != step) or "none"
        return f"the checkpoint of step {step} is not intact; others there: {others}"

    def other_things(self) -> list[str]:
        """What is there besides checkpoints, and what becomes of them; without hidden files. `OSError`."""
        try:
            names = sorted(path.name for path in self.path.iterdir())
        except FileNotFoundError:
            return []
        return [name for name in names if name[0] != "." and not STEP.fullmatch(name.partition(".")[0])]

    def final(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        place, replaced = self.path / str(step), self._replaced(step)
        return replaced if replaced.exists() and not place.exists() else place

    def _replaced(self, step: int) -> Path:
        return self.path / f".{step}.replaced"

    def staging(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.path / f".{step}.saving"

    def tidy(self) -> list[Path]:
        """Remove checkpoints whose writing, or removal, was broken off; those of the first kind.

        One that was about to be replaced gets its name back.
        """
        for path in self.path.glob(".*.replaced"):
            place = self.path / path.name.split(".")[1]
            if place.exists():
                self.discard(path)
            else:
                with suppress(OSError):  # `final` finds it under this name, too
                    path.rename(place)
        unfinished = sorted(self.path.glob(".*.saving"))
        for path in (*unfinished, *self.path.glob(".*.removed")):
            self.discard(path)
        return unfinished

    def commit(self, run: RunState, leaves: LeafRecords, keep: int) -> None:
        """Make a checkpoint visible whose leaves have all been written, and remove the oldest.

        Later ones, of a run that has gone back since, are renamed: they are not its successors. `OSError` if
        it cannot be written, or the leaves of all processes are not where they should be.
        """
        staging, final, replaced = self.staging(run.step), self.path / str(run.step), self._replaced(run.step)
        for leaf in leaves.values():
            for path, size in files_of(leaf):
                if (staging / path).stat().st_size != size:
                    raise OSError(errno.EIO, "not as its rank wrote it; do all share it?", staging / path)
        metadata = tree_metadata([leaf.key for leaf in leaves.values()], run.stored())
        files = Files(metadata=write_file(staging / METADATA, metadata))
        content = msgspec.to_builtins(Content(files=files, leaves=dict(leaves)))
        write_file(staging / MANIFEST, json.dumps({"crc32": _checksum(content), "content": content}).encode())
        sync(staging)
        if os.path.lexists(final / MANIFEST):
            self.discard(replaced)
            final.rename(replaced)
        elif os.path.lexists(final):
            move_away(final)
        staging.rename(final)  # from here on it is complete
        sync(self.path)
        self.discard(replaced)
        for step in self.steps():
            if step > run.step:
                aside = move_away(self.final(step))
                say(f"the checkpoint of step {step}, of a run that has gone back since, is kept as {aside}")
        for step in self.steps()[:-keep]:
            _remove(self.final(step))

    def import_checkpoint(self, checkpoint: Path) -> Path:
        """Copy a complete checkpoint of another step, to be seen in full or not at all; the copy."""
        step = int(checkpoint.name)
        staging, final = self.staging(step), self.final(step)
        try:
            self.discard(staging)
            for path in [own for own in checkpoint.rglob("*") if not own.is_dir()]:  # if one goes: an error
                copy = staging / path.relative_to(checkpoint)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
                sync(copy)
            staging.rename(final)
            sync(self.path)
        except OSError:
            self.discard(staging)
            raise
        return final

    def discard(self, path: Path) -> None:
        """Remove what there is of an unfinished checkpoint, if that is possible."""
        shutil.rmtree(path, ignore_errors=True)

    def open(self, step: int, check: StateCheck = lambda run: None) -> tuple[RunState, LeafRecords]:
        """A checkpoint's state, for which `check` may raise `ValueError`, and its leaves by name.

        Raises:
            Damaged: the manifest or the metadata are not as they were written, or not of this step.
            UsageError: a later version wrote it, and keeps more than this one knows.
        """
        manifest, metadata = self.final(step) / MANIFEST, self.final(step) / METADATA
        with _damaged_if_wrong(manifest):
            sealed = as_kind(load_json(manifest), Sealed)
            if sealed.crc32 != _checksum(sealed.content):
                raise Damaged(f"{manifest} is not as it was written")
            content = content_of(sealed)
        stored = read_file(metadata, content.files.metadata)
        with _damaged_if_wrong(metadata):
            state = as_kind(parse_json(stored), Metadata).custom_metadata
        if unknown := sorted(state.keys() - {item.name for item in fields(RunState)}):
            raise UsageError(
                f"{self.final(step)} has {printable(', '.join(unknown))}, which this version of rrfp_jax "
                f"does not know: use the version that wrote it"
            )
        with _damaged_if_wrong(metadata):
            check(run := run_state(state, step))
        return run, content.leaves


@contextmanager
def _damaged_if_wrong(file: Path) -> Iterator[None]:
    """What cannot be in a file is damage of that file."""
    try:
        yield
    except OSError as error:
        raise Damaged(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Damaged(f"{file}: {printable(str(error))}") from None


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint such that it is never seen in part."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):
        checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


class CheckpointView(NamedTuple):
    """A complete checkpoint as a process reads it that has no part in the run; first its small files."""

    folder: Path
    run: RunState
    leaves: Mapping[Key, LeafRecord]

    def array(self, key: Key) -> np.ndarray[Any, Any]:
        """A whole array; `Damaged` if a file is not as it was written."""
        return np.asarray(read_leaf(self.folder, self.leaves[key]))


def folder_of(what: str, given: Any) -> Path:
    """A folder of checkpoints that was given for this; it need not be there."""
    if not isinstance(given, (str, PathLike)) or not str(given):
        raise UsageError(f"{what}({given!r}): give a folder of checkpoints, such as 'runs/checkpoints'")
    path = path_of(f"{what}: folder", given)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{what}({str(given)!r}): is a file; give a folder of checkpoints")
    return path


def readable_checkpoints(what: str, given: AnyPath, step: int | None = None) -> Iterator[CheckpointView]:
    """The checkpoints of a folder, or the one that it is, whose small files are intact, the latest first.

    Those that come while they are read are the last.

    `UsageError`, which begins with `what` the folder is for, if there are none, or none of the wanted step;
    `TrainingError` after the last: whoever asks for another could use none of them.
    """
    path = folder_of(what, given)
    if STEP.fullmatch(path.name) and (path / MANIFEST).exists():
        if step not in (None, int(path.name)):
            raise UsageError(f"{what}({str(given)!r}): is the checkpoint of step {path.name}, not of {step}")
        path, step = path.parent, int(path.name)
    folder = CheckpointFolder(path)
    every = folder.candidates()
    steps = [own for own in every if step in (None, own)]
    if not steps:
        found = "no checkpoint is there; give the folder that they were saved to"
        if every:
            found = f"no checkpoint of step {step} is there; there are: {', '.join(map(str, every))}"
        raise UsageError(f"{what}({str(given)!r}): {found}")
    while steps:
        for own in reversed(steps):
            try:
                run, leaves = folder.open(own)
            except Damaged as error:
                say(f"the checkpoint {folder.final(own)} is rejected: {error}")
            else:
                yield CheckpointView(folder.final(own), run, {leaf.key: leaf for leaf in leaves.values()})
        # A run that still saves may have removed them meanwhile, for newer ones.
        steps = [own for own in folder.steps() if step is None and own > steps[-1]]
    raise TrainingError(f"{what}({str(given)!r}): {folder.none_intact(step)}")
