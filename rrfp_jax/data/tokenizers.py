"""Text to tokens: as bytes, by a `tokenizers` JSON file, or by a sentencepiece model; all local."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.errors import UsageError, imported
from rrfp_jax.fields import check_fields, expanded
from rrfp_jax.files import read_whole

LARGEST_TOKENIZER = 2**30
"""Bytes of a tokenizer's file."""


class Tokenizer(Protocol):
    """Text to tokens, the same on every process."""

    @property
    def size(self) -> int:
        """One more than the largest token."""

    @property
    def fingerprint(self) -> str:
        """Changes with whatever tokens depend on."""

    def encode(self, text: str) -> NDArray[Any]:
        """The tokens of a text, without special ones."""


@dataclass(frozen=True)
class Bytes:
    """Every byte of UTF-8 a token, 256 in all; files are taken as they are, whatever their encoding.

    Args:
        strict: read all documents at the start and count what is not UTF-8 as bad.
    """

    strict: bool = False

    size = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[np.uint8]:
        """In UTF-8."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)


@dataclass(frozen=True)
class ModelFile:
    """A tokenizer that is a file of some package."""

    path: str

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "path", str(expanded("path", self.path)))  # packages take no Path

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the file."""
        try:
            return hashlib.blake2b(read_whole(self.path, LARGEST_TOKENIZER), digest_size=8).hexdigest()
        except OSError as error:
            raise UsageError(f"tokenizer {self.path}: cannot be read: {error.strerror}") from error

    def _read_by(self, name: str, kind: str, read: Callable[[Any], Any]) -> Any:
        """What a package of this name reads from the file; `UsageError` if the file is not of the kind."""
        package = imported(name, f"the tokenizer {self.path}")
        assert self.fingerprint  # which asks first whether the file is there
        try:
            return read(package)
        except Exception as error:  # packages raise no narrower one
            raise UsageError(f"{self.path}: not {kind} ({error})") from error


class TokenizerFile(ModelFile):
    """The JSON file of a Hugging Face tokenizer (`tokenizer.json`).

    Raises:
        UsageError: no such file, or `tokenizers` is not installed or does not understand it; when first used.
    """

    @functools.cached_property
    def size(self) -> int:
        """With added tokens."""
        return 1 + int(max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    def encode(self, text: str) -> NDArray[np.int32]:
        """Without what its template would add."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        kind = "the JSON file of a tokenizer"
        tokenizer = self._read_by("tokenizers", kind, lambda it: it.Tokenizer.from_file(self.path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer


class SentencePiece(ModelFile):
    """A sentencepiece model file. Raises as `TokenizerFile` does."""

    @property
    def size(self) -> int:
        """With control tokens."""
        return int(self._model.vocab_size())

    def encode(self, text: str) -> NDArray[np.int32]:
        """Without begin and end."""
        return np.array(self._model.encode(text), np.int32)

    @functools.cached_property
    def _model(self) -> Any:
        kind = "a sentencepiece model"
        return self._read_by("sentencepiece", kind, lambda it: it.SentencePieceProcessor(self.path))
