"""Safetensors files: parameters taken from them leaf by leaf, and folders of them written whole."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import AnyPath, path_of
from rrfp_jax.files import move_away, opened_binary, sync
from rrfp_jax.json_files import Unreadable, read_json, write_json
from rrfp_jax.printing import say
from rrfp_jax.runtime.programs.initial import InitFunction

MOST_TOLD = 5
"""Parameters, or tensors, that a message names."""


@dataclass(frozen=True)
class Tensor:
    """A stored tensor, or several, and what makes a parameter of it.

    Attributes:
        name: in the file; a tuple of several.
        transform: such as `np.transpose`, or `lambda w: w.T.reshape(d, heads, -1)`; it is called with all of
            them, `lambda k, v: np.concatenate([k, v]).T`.
    """

    name: str | tuple[str, ...]
    transform: Callable[..., np.ndarray] = np.asarray

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its tensors."""
        return (self.name,) if isinstance(self.name, str) else self.name

    def __str__(self) -> str:
        return f"tensor {self.name!r}" if isinstance(self.name, str) else f"tensors {list(self.name)}"


TensorChoice: TypeAlias = Tensor | str | None
"""The stored tensor of a parameter, by name if it is stored as it is; None to keep the layer's own value."""

NameMap: TypeAlias = Mapping[str, TensorChoice] | Callable[[str], TensorChoice]
"""By the name of a parameter such as "3.attention.query". A mapping must have them all."""


def check_names(names: Any) -> None:
    """Refuse what is no map of names (`UsageError`)."""
    if not isinstance(names, Mapping) and not callable(names):
        raise UsageError(f"names={names!r}: give a dict or a function of a parameter's name")


@dataclass(frozen=True)
class FromTensors:
    """The `init` of a `Trainer` that takes parameters from stored tensors."""

    names: NameMap
    known: Collection[str]  # names of all tensors
    where: str  # they are, for messages
    read: Callable[[str], np.ndarray]

    def __call__(self, path: str, spec: jax.ShapeDtypeStruct) -> Any:
        """A parameter, or None for the layer's own; `UsageError` if its tensor does not fit."""
        tensor = self._tensor(path)
        if tensor is None:
            return None
        if (name := self._absent(tensor)) is not None:
            raise UsageError(f"{self._why_absent(path, name)}; correct the map of names")
        return _fitted(path, spec, tensor, [self.read(name) for name in tensor.names])

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """Refuse parameters whose tensors are not there; see `ModelCheckedInit`."""
        asked = [(path, self._tensor(path)) for path in params if path not in owners]
        if absent := [(path, name) for path, own in asked if own and (name := self._absent(own)) is not None]:
            wrong = [self._why_absent(path, name) for path, name in absent[:MOST_TOLD]]
            raise UsageError(f"{first_few(wrong, len(absent))}; correct the map of names")

    def _tensor(self, path: str) -> Tensor | None:
        names = self.names
        if isinstance(names, Mapping) and path not in names:
            raise UsageError(f"{path}: not in the map of names; None there keeps the layer's own values")
        chosen = names[path] if isinstance(names, Mapping) else names(path)
        tensor = Tensor(chosen) if isinstance(chosen, str) else chosen
        if tensor is not None and not isinstance(tensor, Tensor):
            raise UsageError(
                f"{path}: {chosen!r} in the map of names is no stored tensor; give its name, "
                f"rrfp_jax.weights.Tensor(name, transform), or None to keep the layer's own values"
            )
        return tensor

    def _absent(self, tensor: Tensor) -> str | None:
        """The first of a parameter's tensors that is not there."""
        return next((name for name in tensor.names if name not in self.known), None)

    def _why_absent(self, path: str, name: str) -> str:
        near = get_close_matches(name, self.known, n=1, cutoff=0.4)
        return f"{path}: no tensor {name!r} in {self.where}" + (f", but there is {near[0]!r}" if near else "")


class FromFiles(FromTensors):
    """Of tensors in files of others, which are there when a run resumes, unlike those of another run."""

    @classmethod
    def of(cls, files: Mapping[str, Path], names: NameMap, *more: Any) -> Self:
        """Of the tensors that `files_of_tensors` has found; with `more` fields of a subclass."""
        paths = sorted({str(path) for path in files.values()})
        told = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
        return cls(names, files, told, lambda name: _read(files[name], name), *more)

    def source_of(self, path: str) -> str | None:
        """See `SourcedInit`."""
        return None if self._tensor(path) is None else self.where


def first_few(told: Sequence[str], count: int | None = None) -> str:
    """The first of so many sentences or names, and how many more there are."""
    more = (len(told) if count is None else count) - MOST_TOLD
    return "; ".join(told[:MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _fitted(path: str, spec: jax.ShapeDtypeStruct, tensor: Tensor, found: Sequence[np.ndarray]) -> np.ndarray:
    shapes = " and ".join(str(list(array.shape)) for array in found)
    try:
        value = np.asarray(tensor.transform(*found))
    except Exception as error:
        raise UsageError(f"{path}: the transform of {tensor} {shapes} failed: {error}") from error
    if value.shape != spec.shape:
        raise UsageError(
            f"{path} has the shape {list(spec.shape)}, {tensor} {shapes} as stored "
            f"and {list(value.shape)} as transformed; give Tensor(name, transform)"
        )
    if value.dtype == spec.dtype:
        return value
    if not all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (value.dtype, spec.dtype)):
        raise UsageError(f"{path} is {spec.dtype}, {tensor} {value.dtype}; convert it in a transform")
    try:
        return converted(value, spec.dtype)
    except ValueError as error:
        raise UsageError(
            f"{path} is {spec.dtype}, too small for {error} of {tensor} ({value.dtype}); give the parameter "
            f"another dtype, or a transform that scales"
        ) from None


def converted(value: np.ndarray, dtype: Any) -> np.ndarray:
    """Floating-point values in another dtype; `ValueError` says how many are too large, and one of them."""
    with np.errstate(over="ignore"):  # which is told below
        found = value.astype(dtype)
    lost = ~np.isfinite(found) & np.isfinite(value)  # of some float8 only NaN is left
    if lost.any():
        raise ValueError(f"{lost.sum()} values such as {float(value[lost][0]):g}")
    return found


INDEX = "model.safetensors.index.json"
"""Says which of a folder's files has which tensor, as files at huggingface.co are split."""


class Index(msgspec.Struct, frozen=True):
    """The file of each tensor; other keys are of no interest."""

    weight_map: dict[str, str]


def pretrained(files: AnyPath | Sequence[AnyPath], names: NameMap) -> InitFunction:
    """The `init` of a `Trainer` that takes parameters from safetensors files.

    Floating-point values are brought to the parameter's dtype, unless they are too large for it; any other
    difference is rejected.

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
    return FromFiles.of(files_of_tensors(files), names)


def files_of_tensors(files: AnyPath | Sequence[AnyPath]) -> dict[str, Path]:
    """The file of each tensor, of which only the name is read; see `pretrained`, also for what is raised."""
    where: dict[str, Path] = {}
    for path in _listed(files):
        for name in _names(path):
            if name in where:
                raise UsageError(
                    f"tensor {name!r} is in {where[name]} and in {path}; give files of one model"
                )
            where[name] = path
    return where


def _listed(files: AnyPath | Sequence[AnyPath]) -> list[Path]:
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
        with opened_binary(path), safe_open(path, "numpy") as file:
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


FORMAT = {"format": "pt"}
"""What `transformers` wants to be told: that matrices are [outputs, inputs], as PyTorch has them."""


class TensorSource(NamedTuple):
    """What makes some tensors, of so many bytes together, which are written to one file."""

    names: tuple[str, ...]
    nbytes: int
    read: Callable[[], Sequence[np.ndarray[Any, Any]]]


def check_absent(folder: Path, replace: bool) -> None:
    """Refuse, before anything is read, a folder that is there, or is to be in none (`UsageError`)."""
    if folder.name in ("", ".."):
        raise UsageError(f"{folder}: give the name of a folder that is to be made")
    if not folder.parent.is_dir():
        raise UsageError(f"{folder}: there is no folder {folder.parent}")
    if not replace and (folder.is_symlink() or folder.exists()):
        raise UsageError(f"{folder}: is there already; give another folder, or --replace, which renames it")


def write_tensors(
    folder: Path, sources: Sequence[TensorSource], most_bytes: float, others: Mapping[str, Any], replace: bool
) -> int:
    """Write a new folder of tensors and other JSON files; how many files of tensors it has.

    One file is in memory at a time, twice; it has at most so many bytes, unless a single source has more.
    With `replace`, what is there is renamed to the first free `<folder>.<number>`. `TrainingError` if it
    cannot be written; nothing is left of it then.
    """
    shards: list[list[TensorSource]] = [[]]
    for source in sources:
        if shards[-1] and sum(own.nbytes for own in shards[-1]) + source.nbytes > most_bytes:
            shards.append([])
        shards[-1].append(source)
    staging = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.exporting")
    try:
        staging.mkdir()
        files = {}
        for number, shard in enumerate(shards, 1):
            of = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            file = staging / f"model{of}.safetensors"
            arrays = [array for source in shard for array in source.read()]
            names = [name for source in shard for name in source.names]
            tensors = dict(zip(names, (np.asarray(array, order="C") for array in arrays), strict=True))
            save_file(tensors, file, FORMAT)
            file.chmod(staging.stat().st_mode & 0o666)  # safetensors makes files for their user alone
            sync(file)
            files.update(dict.fromkeys(names, file.name))
        total = sum(source.nbytes for source in sources)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        for name, content in {**others, **({INDEX: index} if len(shards) > 1 else {})}.items():
            write_json(staging / name, content, indent=2)
            sync(staging / name)
        check_absent(folder, replace)  # as the command did before: writing took a while
        if folder.is_symlink() or folder.exists():
            say(f"{folder} is renamed to {move_away(folder)}")
        staging.rename(folder)
    except (OSError, SafetensorError) as error:  # the latter also for a disk that is full
        raise TrainingError(f"{folder}: cannot be written: {getattr(error, 'strerror', error)}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return len(shards)
