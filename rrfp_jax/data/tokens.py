"""Documents as tokens in one memory-mapped array, with the offsets where they begin."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rrfp_jax.data.sources import BadDocument
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, expanded
from rrfp_jax.files import opened


@dataclass(frozen=True)
class TokenFile:
    """Tokens of all documents, one after the other, in an integer array on disk.

    Args:
        path: a one-dimensional `.npy`, or raw numbers (`.bin`).
        dtype: of raw numbers; a `.npy` tells its own.
        offsets: where documents begin, ascending from 0, int64 in a `.npy` (or raw, `.bin`); the number of
            tokens may stand at the end. "" for the path with `.offsets.npy` in place of its suffix.

    Raises:
        UsageError: when first used: a file is missing or is something else, or offsets do not fit.
    """

    path: str
    dtype: DTypeLike = "uint16"
    offsets: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """`file:index`."""
        return [f"{self._path.name}:{i}" for i in range(len(self.sizes))]

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """In tokens."""
        return np.diff(self._offsets)

    def read(self, document: int, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """A copy of the document's tokens."""
        first, last = self._offsets[document : document + 2]
        tokens = self._tokens
        if tokens.base.size() < tokens.offset + tokens.nbytes:  # else the kernel would end the process
            raise BadDocument(f"{self.path} is shorter than it was at the start")
        return np.array(tokens[first + begin : last if end is None else first + end])

    @property
    def files(self) -> Sequence[Path]:
        """The files that are read."""
        return [self._path, self._offsets_path]

    @property
    def _path(self) -> Path:
        return expanded("path", self.path)

    @property
    def _offsets_path(self) -> Path:
        return expanded("offsets", self.offsets) if self.offsets else offsets_path(self._path)

    @functools.cached_property
    def _tokens(self) -> Any:  # a np.memmap
        return _mapped(self._path, self.dtype, "tokens")

    @functools.cached_property
    def _offsets(self) -> NDArray[np.int64]:
        path = self._offsets_path
        offsets = np.asarray(_mapped(path, np.int64, "offsets of documents"), np.int64)
        total = len(self._tokens)
        if not offsets.size or offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] > total:
            raise UsageError(
                f"{path}: offsets of documents must ascend from 0 to at most the {total} tokens of "
                f"{self.path}"
            )
        return offsets if offsets[-1] == total and offsets.size > 1 else np.append(offsets, total)


def offsets_path(tokens: Path) -> Path:
    """Where the offsets of a token file are, unless said otherwise."""
    return tokens.with_suffix(".offsets.npy")


def _mapped(path: Path, dtype: DTypeLike, what: str) -> NDArray[Any]:
    try:
        with opened(path):  # nothing but a file can be mapped, and a pipe must not be waited for
            array: NDArray[Any] = (
                np.lib.format.open_memmap(path, mode="r")
                if path.suffix == ".npy"
                else np.memmap(path, dtype, mode="r")
            )
    except Exception as error:  # NumPy's reading of headers raises many kinds
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: no array of {what} ({reason})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"{path}: {array.dtype}{list(array.shape)} cannot be {what}: one axis of integers can"
        )
    return array
