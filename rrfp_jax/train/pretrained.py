"""Initial parameters from safetensors files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_path
from rrfp_jax.files import opened
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.train.stored import NameMap, check_names, from_tensors


def pretrained(files: str | PathLike[str] | Sequence[str | PathLike[str]], names: NameMap) -> InitFunction:
    """The `init` of a `Trainer` that takes parameters from safetensors files.

    Floating-point values are brought to the parameter's dtype, unless they are too large for it; any other
    difference is refused.

    Args:
        files: a file, several, or a folder with all its `*.safetensors`.
        names: the stored tensor of each parameter.

    Raises:
        UsageError: no such file, no safetensors file, or two of them have a tensor of the same name. So does
            the function that is returned, where the map has no stored tensor of a parameter, or one that is
            not there or does not fit.
    """
    check_names(names)
    where = _index(_listed(files))
    return from_tensors(names, where, _some(where), lambda name: _read(where[name], name))


def _listed(files: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[Path]:
    given = [files] if isinstance(files, (str, PathLike)) else files
    if not isinstance(given, Sequence) or not all(isinstance(path, (str, PathLike)) for path in given):
        raise UsageError(f"files={files!r}: give a safetensors file, several, or a folder with them")
    found: list[Path] = []
    for path in given:
        check_path("files", path)
    for path in map(Path, given):
        found += sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not found:
        raise UsageError(f"files={files!r}: no *.safetensors file is there")
    return found


def _index(files: Sequence[Path]) -> dict[str, Path]:
    """The file of each tensor."""
    where: dict[str, Path] = {}
    for path in files:
        try:
            with opened(path), safe_open(path, "numpy") as file:
                names = list(file.keys())
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{path}: cannot be read as safetensors: {reason}") from None
        for name in names:
            if name in where:
                raise UsageError(
                    f"tensor {name!r} is in {where[name]} and in {path}; give files of one model"
                )
            where[name] = path
    return where


def _read(path: Path, name: str) -> np.ndarray:
    try:
        with safe_open(path, "numpy") as file:
            return np.asarray(file.get_tensor(name))
    except (OSError, SafetensorError, AttributeError) as error:  # AttributeError: a dtype that NumPy lacks
        raise UsageError(f"{path}: tensor {name!r} cannot be read: {error}") from None


def _some(where: Mapping[str, Path]) -> str:
    files = sorted({str(path) for path in where.values()})
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
