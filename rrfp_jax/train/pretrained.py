"""Initial parameters from safetensors files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of
from rrfp_jax.files import opened
from rrfp_jax.json_files import Unreadable, read_json
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.train.stored import FromTensors, NameMap, check_names

INDEX = "model.safetensors.index.json"
"""Says which of a folder's files has which tensor, as files at huggingface.co are split."""


class Index(msgspec.Struct, frozen=True):
    """The file of each tensor; other keys are of no interest."""

    weight_map: dict[str, str]


def pretrained(files: str | PathLike[str] | Sequence[str | PathLike[str]], names: NameMap) -> InitFunction:
    """The `init` of a `Trainer` that takes parameters from safetensors files.

    Floating-point values are brought to the parameter's dtype, unless they are too large for it; any other
    difference is refused.

    Args:
        files: a file, several, or a folder: with a `model.safetensors.index.json` the files that it names,
            else all its `*.safetensors`.
        names: the stored tensor of each parameter.

    Raises:
        UsageError: no such file, no safetensors file, or two of them have a tensor of the same name. So does
            the function that is returned, where the map has no stored tensor of a parameter, or one that is
            not there or does not fit.
    """
    check_names(names)
    return TensorFiles.of(files).init(names)


@dataclass(frozen=True)
class TensorFiles:
    """Safetensors files, of which nothing but the names of their tensors has been read.

    Attributes:
        where: the file of each tensor.
    """

    where: Mapping[str, Path]

    @classmethod
    def of(cls, files: str | PathLike[str] | Sequence[str | PathLike[str]]) -> TensorFiles:
        """See `pretrained`; also for what is raised."""
        where: dict[str, Path] = {}
        for path in _listed(files):
            for name in _names(path):
                if name in where:
                    raise UsageError(
                        f"tensor {name!r} is in {where[name]} and in {path}; give files of one model"
                    )
                where[name] = path
        return cls(where)

    def __str__(self) -> str:
        files = sorted({str(path) for path in self.where.values()})
        return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"

    def init(self, names: NameMap) -> FromTensors:
        """Parameters from these tensors."""
        return FromTensors(names, self.where, str(self), lambda name: _read(self.where[name], name))


def _listed(files: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[Path]:
    given = [files] if isinstance(files, (str, PathLike)) else files
    if not isinstance(given, Sequence) or not all(isinstance(path, (str, PathLike)) for path in given):
        raise UsageError(f"files={files!r}: give a safetensors file, several, or a folder with them")
    found: list[Path] = []
    for path in [path_of("files", own) for own in given]:
        found += _in_folder(path) if path.is_dir() else [path]
    if not found:
        raise UsageError(f"files={files!r}: no *.safetensors file is there")
    return found


def _in_folder(folder: Path) -> list[Path]:
    """Its files; with an index those that it names, since there may be the same tensors in another form."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        named = sorted(set(read_json(index, Index).weight_map.values()))
    except Unreadable as error:
        raise UsageError(str(error)) from None
    if odd := [name for name in named if Path(name).name != name]:
        raise UsageError(f"{index}: {odd[0]!r} is no file of its folder")
    if absent := [name for name in named if not (folder / name).exists()]:
        raise UsageError(
            f"{index}: {len(absent)} of its {len(named)} files are not there, such as {absent[0]}"
        )
    return [folder / name for name in named]


def _names(path: Path) -> list[str]:
    """Of a file's tensors."""
    try:
        with opened(path), safe_open(path, "numpy") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read as safetensors: {reason}") from None


def _read(path: Path, name: str) -> np.ndarray:
    try:
        with safe_open(path, "numpy") as file:
            return np.asarray(file.get_tensor(name))
    except (OSError, SafetensorError, AttributeError) as error:  # AttributeError: a dtype that NumPy lacks
        raise UsageError(f"{path}: tensor {name!r} cannot be read: {error}") from None
