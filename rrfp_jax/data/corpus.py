"""All documents of a source as tokens: how long each is, which are bad, and the tokens on demand."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.bad import Bad, check_bad, judge
from rrfp_jax.data.sources import BadDocument, Raw, Source
from rrfp_jax.data.tokenizers import Bytes, Tokenizer, check_vocabulary
from rrfp_jax.data.tokens import offsets_path
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, check_not_read, path_of
from rrfp_jax.files import written_whole

CACHED = 64
"""Documents kept as tokens, so that pieces of a long one are not each tokenized anew."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as tokens.

    Lengths are needed before the first step. They are known from sizes if documents are bytes or tokens
    already; else every process tokenizes all text once for that (`write_tokens` saves this).

    Args:
        source: of the documents.
        tokenizer: for text; None if documents are tokens.
        vocabulary: of the model; a tokenizer or token beyond it is refused.
        end: a token to put behind every document, so that its end is learnt; None for none.
        bad: "refuse" or "skip" documents that are bad: unreadable, undecodable, not what the source holds,
            or "too short", with fewer than two tokens. What is skipped is counted in a warning.

    Raises:
        UsageError: an impossible setting, when made; bad documents or no others, when first used.
    """

    source: Source
    tokenizer: Tokenizer | None
    vocabulary: int
    end: int | None = None
    bad: Bad = "refuse"

    def __post_init__(self) -> None:
        check_fields(self)
        check_vocabulary(self.tokenizer, self.vocabulary, self.end)
        check_bad(self.bad)

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64[N]: tokens of every document, ends included; 0 for those skipped."""
        lengths, reasons = self._measure()
        lengths += 0 if self.end is None else 1
        for document in np.flatnonzero(lengths < 2).tolist():
            reasons.setdefault(document, "too short")
        if reasons:
            judge(self.source.names, reasons, self.bad)
            lengths[list(reasons)] = 0
        if not lengths.any():
            raise UsageError(f"{self.source}: {len(lengths)} documents there, none of which can be used")
        return lengths

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with names and lengths of documents and with the tokenizer."""
        digest = hashlib.blake2b("\0".join(self.source.names).encode(errors="surrogateescape"), digest_size=7)
        digest.update(self.lengths.tobytes())
        digest.update(f"{self.end} {self.tokenizer and self.tokenizer.fingerprint}".encode())
        return int.from_bytes(digest.digest())

    def tokens(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """The tokens `begin:end` of a document; no more of it is read than needed, if its sizes are known.

        Raises:
            UsageError: the document has changed since the start, or has a token beyond the vocabulary.
        """
        length = int(self.lengths[document]) - (self.end is not None)
        try:
            if self._read_in_parts:
                tokens = self._encoded(self.source.read(document, begin, min(end, length)))
            else:
                tokens = self._whole(document)
                if len(tokens) != length:
                    raise BadDocument(f"{len(tokens)} tokens, {length} at the start")
                tokens = tokens[begin:end]
        except BadDocument as error:
            raise UsageError(
                f"{self.source.names[document]}: {error}; the data was changed during the run: "
                f"leave it alone and start again"
            ) from error
        if self.end is not None and end > length:
            tokens = np.append(tokens, self.end)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise UsageError(
                f"{self.source.names[document]}: tokens from {tokens.min()} to {tokens.max()}, but the "
                f"model's vocabulary has {self.vocabulary}; give the model more, or tokenize anew"
            )
        return tokens

    @functools.cached_property
    def _read_in_parts(self) -> bool:
        return self.source.sizes is not None and (self.tokenizer is None or isinstance(self.tokenizer, Bytes))

    def _measure(self) -> tuple[NDArray[np.int64], dict[int, str]]:
        """Lengths without ends, and what is wrong with documents, by index."""
        sizes, strict = self.source.sizes, isinstance(self.tokenizer, Bytes) and self.tokenizer.strict
        if sizes is not None and self._read_in_parts and not strict:
            unreadable = np.flatnonzero(sizes < 0).tolist()
            return np.maximum(sizes, 0), dict.fromkeys(unreadable, "unreadable")
        lengths, reasons = np.zeros(len(self.source.names), np.int64), {}
        for document in range(len(lengths)):
            try:
                raw = self.source.read(document)
                if strict and isinstance(raw, bytes):
                    raw = _decoded(raw)
                lengths[document] = len(self._encoded(raw))
            except BadDocument as error:
                reasons[document] = str(error)
        return lengths, reasons

    def _encoded(self, raw: Raw) -> NDArray[Any]:
        if isinstance(raw, np.ndarray):
            if self.tokenizer is not None:
                raise UsageError(f"tokenizer={self.tokenizer}: {self.source} holds tokens already; give None")
            return raw
        if self.tokenizer is None:
            raise UsageError(f"tokenizer=None: {self.source} holds text; give a tokenizer, such as Bytes()")
        if isinstance(raw, bytes):
            if isinstance(self.tokenizer, Bytes):
                return np.frombuffer(raw, np.uint8)
            raw = _decoded(raw)
        try:
            return self.tokenizer.encode(raw)
        except UnicodeEncodeError as error:  # half of a pair, which JSON may hold
            raise BadDocument("undecodable") from error

    @functools.cached_property
    def _whole(self) -> Any:
        return functools.lru_cache(CACHED)(lambda document: self._encoded(self.source.read(document)))


def write_tokens(corpus: Corpus, path: str | PathLike[str]) -> None:
    """Tokenize once for all runs: the corpus's good documents as the files that a `TokenFile` reads.

    Args:
        corpus: whose `end` is written, too.
        path: a `.npy`; `.offsets.npy` goes beside it.

    Raises:
        UsageError: another suffix, which `TokenFile` would take for raw numbers; a file that cannot be
            written, or that the corpus reads; and what `Corpus` refuses. Earlier files are as they were.
    """
    path = path_of("path", path)
    if path.suffix != ".npy":
        raise UsageError(f"path={path}: tokens are written as an array; give a name that ends in .npy")
    kept = np.flatnonzero(corpus.lengths)
    offsets = np.concatenate([[0], np.cumsum(corpus.lengths[kept])])
    dtype = np.uint16 if corpus.vocabulary <= 2**16 else np.int32
    for output in (path, offsets_path(path)):
        check_not_read("path", output, getattr(corpus.source, "files", ()))
    try:
        with written_whole(path) as part, written_whole(offsets_path(path)) as beside:
            tokens = np.lib.format.open_memmap(part, "w+", dtype, (int(offsets[-1]),))  # type: ignore[no-untyped-call]
            for document, begin, end in zip(kept.tolist(), offsets, offsets[1:], strict=False):
                tokens[begin:end] = corpus.tokens(document, 0, int(end - begin))
            tokens.flush()
            with beside.open("wb") as file:
                np.save(file, offsets)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument("undecodable") from error
