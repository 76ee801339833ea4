"""A folder of safetensors files, written as models are published: whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.files import move_away
from rrfp_jax.json_files import write_json
from rrfp_jax.printing import say
from rrfp_jax.train.pretrained import INDEX

FORMAT = {"format": "pt"}
"""What `transformers` wants to be told: that matrices are [outputs, inputs], as PyTorch has them."""


@dataclass(frozen=True)
class Source:
    """What makes some tensors, which are written to one file.

    Attributes:
        names: of the tensors.
        nbytes: of all of them.
        read: gives them.
    """

    names: tuple[str, ...]
    nbytes: int
    read: Callable[[], Sequence[np.ndarray[Any, Any]]]


def check_absent(folder: Path, replace: bool) -> None:
    """Refuse, before anything is read, a folder that cannot be written.

    Raises:
        UsageError: it is there and `replace` is not asked for, or is to be in no folder.
    """
    if folder.name in ("", ".."):
        raise UsageError(f"{folder}: give the name of a folder that is to be made")
    if not folder.parent.is_dir():
        raise UsageError(f"{folder}: there is no folder {folder.parent}")
    if not replace and (folder.is_symlink() or folder.exists()):
        raise UsageError(
            f"{folder}: is there already; give another folder, or --replace, which renames that one"
        )


def write_tensors(
    folder: Path, sources: Sequence[Source], most_bytes: float, others: Mapping[str, Any], replace: bool
) -> int:
    """Write a new folder; how many files of tensors it has.

    One file is in memory at a time, twice.

    Args:
        folder: of the files; they are written beside it, and then it is renamed.
        sources: of all tensors.
        most_bytes: of a file, unless a single source has more.
        others: JSON files, by name.
        replace: rename what is there to the first free `<folder>.<number>`.

    Raises:
        UsageError: see `check_absent`.
        TrainingError: it cannot be written; nothing is left of it.
    """
    check_absent(folder, replace)
    shards = list(_shards(sources, most_bytes))
    with _whole(folder, replace) as staging:
        files = {}
        for number, shard in enumerate(shards, 1):
            of = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            file = staging / f"model{of}.safetensors"
            arrays = [array for source in shard for array in source.read()]
            names = [name for source in shard for name in source.names]
            tensors = dict(zip(names, (np.asarray(array, order="C") for array in arrays), strict=True))
            save_file(tensors, file, FORMAT)
            file.chmod(staging.stat().st_mode & 0o666)  # safetensors makes files for their user alone
            _sync(file)
            files.update(dict.fromkeys(names, file.name))
        total = sum(source.nbytes for source in sources)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        for name, content in {**others, **({INDEX: index} if len(shards) > 1 else {})}.items():
            write_json(staging / name, content, indent=2)
            _sync(staging / name)
    return len(shards)


def _shards(sources: Sequence[Source], most_bytes: float) -> Iterator[list[Source]]:
    """As many as fit into a file, in order."""
    shard: list[Source] = []
    for source in sources:
        if shard and sum(own.nbytes for own in shard) + source.nbytes > most_bytes:
            yield shard
            shard = []
        shard.append(source)
    yield shard


@contextmanager
def _whole(folder: Path, replace: bool) -> Iterator[Path]:
    """A folder to write into, which is renamed at the end, and removed if there is no end."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.exporting")
    try:
        staging.mkdir()
        yield staging
        check_absent(folder, replace)  # again, as it took a while
        if folder.is_symlink() or folder.exists():
            say(f"{folder} is renamed to {move_away(folder)}")
        staging.rename(folder)
    except (OSError, SafetensorError) as error:  # the latter also for a disk that is full
        raise TrainingError(f"{folder}: cannot be written: {getattr(error, 'strerror', error)}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(file: Path) -> None:
    """On the disk on return: a network file system may tell only now that it is full."""
    with file.open("ab") as opened:
        os.fsync(opened.fileno())
