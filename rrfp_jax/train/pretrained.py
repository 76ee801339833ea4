"""Initial parameters from safetensors files, leaf by leaf: only what a stage owns is ever read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_path
from rrfp_jax.files import opened
from rrfp_jax.runtime.programs.initial import InitFunction


@dataclass(frozen=True)
class Tensor:
    """A stored tensor, and what makes a parameter of it.

    Attributes:
        name: in the file.
        transform: such as `np.transpose`, or `lambda w: w.T.reshape(d, heads, -1)`.
    """

    name: str
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray


Stored: TypeAlias = Tensor | str | None
"""The stored tensor of a parameter, by name if it is stored as it is; None to keep the layer's own value."""

NameMap: TypeAlias = Mapping[str, Stored] | Callable[[str], Stored]
"""By the name of a parameter such as "3.attention.query". A mapping must have them all."""


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
    if not isinstance(names, Mapping) and not callable(names):
        raise UsageError(f"names={names!r}: give a dict or a function of a parameter's name")
    where = _index(_listed(files))

    def init(path: str, spec: jax.ShapeDtypeStruct) -> Any:
        if isinstance(names, Mapping) and path not in names:
            raise UsageError(f"{path}: not in the map of names; None there keeps the layer's own values")
        chosen = names[path] if isinstance(names, Mapping) else names(path)
        if chosen is None:
            return None
        tensor = Tensor(chosen) if isinstance(chosen, str) else chosen
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"{path}: {chosen!r} in the map of names is no stored tensor; give its name, "
                f"rrfp_jax.weights.Tensor(name, transform), or None to keep the layer's own values"
            )
        if tensor.name not in where:
            raise UsageError(f"{path}: no tensor {tensor.name!r} in {_some(where)}; correct the map of names")
        return _fitted(path, spec, tensor, _read(where[tensor.name], tensor.name))

    return init


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


def _fitted(path: str, spec: jax.ShapeDtypeStruct, tensor: Tensor, stored: np.ndarray) -> np.ndarray:
    try:
        value = np.asarray(tensor.transform(stored))
    except Exception as error:
        raise UsageError(
            f"{path}: the transform of tensor {tensor.name!r} {list(stored.shape)} failed: {error}"
        ) from error
    if value.shape != spec.shape:
        raise UsageError(
            f"{path} has the shape {list(spec.shape)}, tensor {tensor.name!r} {list(stored.shape)} as stored "
            f"and {list(value.shape)} as transformed; give Tensor(name, transform)"
        )
    floating = all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (value.dtype, spec.dtype))
    if value.dtype != spec.dtype and not floating:
        raise UsageError(
            f"{path} is {spec.dtype}, tensor {tensor.name!r} {value.dtype}; convert it in a transform"
        )
    return _converted(path, spec.dtype, tensor, value) if floating else value


def _converted(path: str, dtype: Any, tensor: Tensor, value: np.ndarray) -> np.ndarray:
    """Floating-point values in another dtype."""
    with np.errstate(over="ignore"):  # which is told below
        converted = value.astype(dtype)
    lost = np.isinf(converted) & np.isfinite(value)
    if lost.any():
        raise UsageError(
            f"{path} is {dtype}, too small for {lost.sum()} values of tensor {tensor.name!r} "
            f"({value.dtype}), such as {float(value[lost][0]):g}; give the parameter another dtype, or "
            f"a transform that scales"
        )
    return converted


def _some(where: dict[str, Path]) -> str:
    files = sorted({str(path) for path in where.values()})
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
