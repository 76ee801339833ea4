"""All documents of a source as tokens: how long each is, which are bad, and what they hold, on demand."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.buckets import Pieces, cut
from rrfp_jax.data.image_sources import ImageSource, Parts
from rrfp_jax.data.images import Image, Patches
from rrfp_jax.data.sources import BadDocument, Raw, Source, offsets_path
from rrfp_jax.data.tokenizers import Bytes, Tokenizer, check_vocabulary
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, check_not_read, path_of, printable, shown
from rrfp_jax.files import written_whole

Bad: TypeAlias = Literal["refuse", "skip"]
"""What is done with documents that are bad."""

NAMED = 10
"""Bad documents of one kind that a message names; it counts the others."""

CACHED = 64
"""Documents kept as read: pieces of a long one, and fields of a microbatch, are asked for one by one."""

Grids: TypeAlias = tuple[tuple[int, int], ...]
"""Rows and columns of patches of each image of a document."""

TEXT = -1
"""In place of a patch, where a token is text."""


@dataclass(frozen=True)
class Lengths:
    """Of documents, int64[N] each; all 0 for those that are skipped.

    Attributes:
        patches: of all images of a document.
        tokens: places in a row. The last token is only a label; if that is an image's, it has a place, too.
        labels: tokens of text behind the first token.
    """

    patches: NDArray[np.int64]
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class TokenizedDocument:
    """A document, or a piece of one, of n tokens."""

    tokens: NDArray[Any]  # int[n]; 0 where an image stands
    patch: NDArray[np.int64] | None = None
    """int64[n]: which merged patch of the document a token stands for, from 0 on, or `TEXT`. Class tokens are
    counted, but no token stands for them. None if all are text."""
    cut: Patches | None = None
    grids: Grids = ()
    images: Sequence[Image] = ()
    pixels: Callable[[], NDArray[np.uint8]] | None = None

    @property
    def counts(self) -> list[int]:
        """Patches of each image."""
        return [self.cut.count(grid) for grid in self.grids] if self.cut else []

    @property
    def places(self) -> int:
        """Tokens of a row; see `Lengths`."""
        text_last = self.patch is None or (len(self.patch) and self.patch[-1] == TEXT)
        return len(self.tokens) - bool(text_last)

    @functools.cached_property
    def is_label(self) -> NDArray[np.bool_]:
        """Whether the token behind each place is text, bool[places]; of a document with images."""
        assert self.patch is not None
        return np.append(self.patch[1:] == TEXT, False)[: self.places]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Patches, places and labels, as in `Lengths`."""
        return sum(self.counts), self.places, int(self.is_label.sum())


def _kept(read: Callable[[Any, int], Any]) -> Any:
    """Let a method of documents keep what it gave for the last `CACHED` of them."""
    return functools.cached_property(lambda self: functools.lru_cache(CACHED)(functools.partial(read, self)))


@dataclass(frozen=True, kw_only=True)
class BaseCorpus:
    """What corpora of text and of text and images share; see `Corpus`."""

    source: Source | ImageSource
    tokenizer: Tokenizer | None
    vocabulary: int
    end: int | None = None
    bad: Bad = "refuse"

    def __post_init__(self) -> None:
        check_fields(self)
        check_vocabulary(self.tokenizer, self.vocabulary, self.end)
        if self.bad not in ("refuse", "skip"):
            raise UsageError(f"bad={self.bad!r}: bad documents are 'refuse'd or 'skip'ped")

    @functools.cached_property
    def good(self) -> NDArray[np.int64]:
        """Indices of documents that are not skipped."""
        return np.flatnonzero(self._all_lengths[-1])

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with names and lengths of documents, and with how they are read."""
        digest = hashlib.blake2b("\0".join(self.source.names).encode(errors="surrogateescape"), digest_size=7)
        for lengths in self._all_lengths:
            digest.update(lengths.tobytes())
        digest.update(self._how.encode())
        return int.from_bytes(digest.digest())

    @property
    def _all_lengths(self) -> Sequence[NDArray[np.int64]]:
        """Arrays int64[N] of the fingerprint."""
        raise NotImplementedError

    @property
    def _how(self) -> str:
        """What else documents depend on."""
        return f"{self.end} {self.tokenizer and self.tokenizer.fingerprint}"

    def _measured_by(self, lengths: NDArray[np.int64], measure: Callable[[int], Any]) -> NDArray[np.int64]:
        """Fill in the lengths of every document, [N] or [N, K]; raises as `_without_bad` does."""
        names, reasons = list(self.source.names), dict[int, str]()
        for document in range(len(names)):
            try:
                lengths[document] = measure(document)
            except BadDocument as error:
                reasons[document], *part = error.args
                names[document] += "".join(f" ({printable(name)})" for name in part if name)
        return self._without_bad(lengths, names, reasons)

    def _without_bad(
        self, lengths: NDArray[np.int64], names: Sequence[str], reasons: Mapping[int, str]
    ) -> NDArray[np.int64]:
        """Lengths with 0 for documents that are skipped; `UsageError` if any is refused, or none is good."""
        if reasons:
            reject_or_warn(names, reasons, self.bad)
            lengths[list(reasons)] = 0
        if not lengths.any():
            raise UsageError(f"{shown(self.source)}: {len(names)} documents there, none of which can be used")
        return lengths

    @contextmanager
    def _as_before(self, document: int, remedy: str = "leave it alone and start again") -> Iterator[None]:
        """Inside, a good document is read once more; `UsageError` if it is bad by now."""
        try:
            yield
        except BadDocument as error:
            raise UsageError(
                f"{self.source.names[document]}: {printable(str(error))}; the data was changed during the "
                f"run: {remedy}"
            ) from error

    def _encoded_text(self, text: str) -> NDArray[Any]:
        assert self.tokenizer is not None
        try:
            return self.tokenizer.encode(text)
        except UnicodeEncodeError as error:  # half of a pair, which JSON may hold
            raise BadDocument("undecodable") from error


@dataclass(frozen=True, kw_only=True)
class Corpus(BaseCorpus):
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

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64[N]: tokens of every document, ends included; 0 for those skipped."""
        if self._sizes is None or self._strict:
            return self._measured_by(np.zeros(len(self.source.names), np.int64), self._length)
        lengths = np.maximum(self._sizes, 0) + (self.end is not None)
        reasons = dict.fromkeys(np.flatnonzero(lengths < 2).tolist(), "too short")
        reasons |= dict.fromkeys(np.flatnonzero(self._sizes < 0).tolist(), "unreadable")
        return self._without_bad(lengths, self.source.names, reasons)

    @property
    def _all_lengths(self) -> Sequence[NDArray[np.int64]]:
        return [self.lengths]

    def pieces(self, documents: NDArray[np.int64], longest: tuple[int, ...]) -> Pieces:
        """These good documents, cut into pieces that are no longer than a row."""
        predictions = np.zeros_like(self.lengths)
        predictions[documents] = self.lengths[documents] - 1
        return cut(predictions, *longest)

    def labels(self, pieces: Pieces) -> NDArray[np.int64]:
        """Labels of each piece, int64[P]."""
        return pieces.size

    def piece(self, pieces: Pieces, number: int, fields: Collection[str]) -> TokenizedDocument:
        """One of the pieces, with what these fields need: masks are made without reading."""
        document, begin, size = (int(of[number]) for of in (pieces.document, pieces.begin, pieces.size))
        tokens = np.zeros(size + 1, np.int64)
        if "tokens" in fields or "labels" in fields:
            tokens = self.tokens(document, begin, begin + size + 1)
        return TokenizedDocument(tokens)

    def tokens(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """The tokens `begin:end` of a document; no more of it is read than needed, if its sizes are known.

        Raises:
            UsageError: the document has changed since the start, or has a token beyond the vocabulary.
        """
        length = int(self.lengths[document]) - (self.end is not None)
        with self._as_before(document):
            if self._sizes is not None:
                tokens = self._encoded(self.source.read(document, begin, min(end, length)))
            else:
                tokens = self._whole(document)
                if len(tokens) != length:
                    raise BadDocument(f"{len(tokens)} tokens, {length} at the start")
                tokens = tokens[begin:end]
        if self.end is not None and end > length:
            tokens = np.append(tokens, self.end)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise UsageError(
                f"{self.source.names[document]}: tokens from {tokens.min()} to {tokens.max()}, but the "
                f"model's vocabulary has {self.vocabulary}; give the model more, or tokenize anew"
            )
        return tokens

    @property
    def _strict(self) -> bool:
        return isinstance(self.tokenizer, Bytes) and self.tokenizer.strict

    @functools.cached_property
    def _sizes(self) -> NDArray[np.int64] | None:
        """Tokens of all documents, if the source tells them, so that parts can be read; -1 if unreadable."""
        return self.source.sizes if self.tokenizer is None or isinstance(self.tokenizer, Bytes) else None

    def _length(self, document: int) -> int:
        raw = self.source.read(document)
        tokens = self._encoded(_decoded(raw) if self._strict and isinstance(raw, bytes) else raw)
        if (length := len(tokens) + (self.end is not None)) < 2:
            raise BadDocument("too short")
        return length

    def _encoded(self, raw: Raw) -> NDArray[Any]:
        if isinstance(raw, np.ndarray):
            if self.tokenizer is not None:
                raise UsageError(f"tokenizer={self.tokenizer}: {self.source} holds tokens already; give None")
            return raw
        if self.tokenizer is None:
            raise UsageError(f"tokenizer=None: {self.source} holds text; give a tokenizer, such as Bytes()")
        if isinstance(raw, bytes) and isinstance(self.tokenizer, Bytes):
            return np.frombuffer(raw, np.uint8)
        return self._encoded_text(_decoded(raw) if isinstance(raw, bytes) else raw)

    @_kept
    def _whole(self, document: int) -> NDArray[Any]:
        return self._encoded(self.source.read(document))


@dataclass(frozen=True, kw_only=True)
class ImageCorpus(BaseCorpus):
    """Documents of text and images as tokens and patches.

    Lengths are needed before the first step, so every process reads all text once, and the images or, with
    `patches.strict=False`, their headers.

    Args:
        source: of the documents.
        tokenizer: for text; each stretch between images by itself.
        vocabulary: of the model; a larger tokenizer is refused.
        patches: how images are cut.
        end: a token to put behind every document, so that its end is learnt; None for none.
        bad: "refuse" or "skip" documents that are bad: with an image that is missing, broken or too large,
            without an image, without text, not what the source holds, or "too short", with nothing to
            predict. What is skipped is counted in a warning.
        text_alone: documents without an image are good.

    Raises:
        UsageError: an impossible setting, when made; bad documents or no others, when first used.
    """

    source: ImageSource
    tokenizer: Tokenizer
    patches: Patches = field(default_factory=Patches)
    text_alone: bool = False

    @property
    def lengths(self) -> Lengths:
        """Of every document."""
        return Lengths(*self._all_lengths)

    @property
    def _all_lengths(self) -> Sequence[NDArray[np.int64]]:
        return self._measured[0]

    @property
    def _how(self) -> str:
        return f"{super()._how} {self.patches}"

    @functools.cached_property
    def _measured(self) -> tuple[Sequence[NDArray[np.int64]], list[Grids]]:
        """Lengths, and grids of images, of every document."""
        grids: list[Grids] = [()] * len(self.source.names)

        def measure(document: int) -> tuple[int, int, int]:
            found = self._read(document)
            grids[document] = found.grids
            return found.lengths

        return list(self._measured_by(np.zeros((len(grids), 3), np.int64), measure).T), grids

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Patches and tokens of every document, int64[N, 2]."""
        return np.stack(self._all_lengths[:2], axis=1)

    def pieces(self, documents: NDArray[np.int64], longest: tuple[int, ...]) -> Pieces:
        """These good documents; they are never cut."""
        return Pieces(documents, documents[:0], self.sizes[documents])

    def labels(self, pieces: Pieces) -> NDArray[np.int64]:
        """Labels of each piece, int64[P]."""
        return self.lengths.labels[pieces.document]

    def piece(self, pieces: Pieces, number: int, fields: Collection[str]) -> TokenizedDocument:
        """One of the pieces; see `document`."""
        return self.document(int(pieces.document[number]))

    def document(self, document: int) -> TokenizedDocument:
        """A document as tokens; `UsageError` if it has changed since the start."""
        with self._as_before(document, self._remedy):
            return self._again(document)  # type: ignore[no-any-return]

    def pixels(self, document: int) -> NDArray[np.uint8]:
        """uint8[P, 3 * size**2]: the patches of its images, one image behind the other.

        Raises:
            UsageError: it has changed since the start, or has an image that is broken behind its header.
        """
        with self._as_before(document, self._remedy):
            return self._cut(document)  # type: ignore[no-any-return]

    @property
    def _remedy(self) -> str:
        return "leave it alone and start again" if self.patches.strict else "or give Patches(strict=True)"

    def _read(self, document: int, known: Grids | None = None) -> TokenizedDocument:
        """A document, read and tokenized; its images are opened unless their grids are known."""
        parts = self.source.read(document)
        images = [part for part in parts if not isinstance(part, str)]
        if not images and not self.text_alone:
            raise BadDocument("without an image")
        if not any(isinstance(part, str) and part.strip() for part in parts):
            raise BadDocument("without text")
        if known is None:
            known = tuple(self.patches.grid_of(image) for image in images)
        elif len(known) != len(images):
            raise BadDocument(f"{len(images)} images, {len(known)} at the start")
        pixels = functools.partial(self.pixels, document)
        found = TokenizedDocument(*self._in_order(parts, known), self.patches, known, images, pixels)
        if not found.lengths[2]:
            raise BadDocument("too short")
        return found

    def _in_order(self, parts: Parts, grids: Grids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`tokens` and `patch` of a document."""
        counts = iter([rows * columns // self.patches.merge**2 for rows, columns in grids])
        tokens, patch, merged = [], [], 0
        before = int(self.patches.class_token)
        for part in parts:
            if isinstance(part, str):
                tokens.append(np.asarray(self._encoded_text(part), np.int64))
                patch.append(np.full(len(tokens[-1]), TEXT))
            else:
                count = next(counts)
                tokens.append(np.zeros(count, np.int64))
                patch.append(merged + before + np.arange(count))
                merged += before + count
        if self.end is not None:
            tokens.append(np.array([self.end]))
            patch.append(np.array([TEXT]))
        return np.concatenate(tokens), np.concatenate(patch)

    @_kept
    def _again(self, document: int) -> TokenizedDocument:
        lengths, grids = self._measured
        found = self._read(document, grids[document])
        known = tuple(int(each[document]) for each in lengths)
        if found.lengths != known:
            raise BadDocument(f"{found.lengths} patches, tokens and labels, {known} at the start")
        return found

    @_kept
    def _cut(self, document: int) -> NDArray[np.uint8]:
        found = self._again(document)
        cut = [self.patches.patches_of(*own) for own in zip(found.images, found.grids, strict=True)]
        return np.concatenate([np.zeros((0, self.patches.values), np.uint8), *cut])


def reject_or_warn(names: Sequence[str], reasons: Mapping[int, str], bad: Bad) -> None:
    """Refuse bad documents (`UsageError`), or warn that they are skipped, by reasons of their indices."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in sorted(set(reasons.values()))}
    for document in sorted(reasons):
        by_kind[reasons[document]].append(names[document])
    text = "; ".join(f"{len(found)} {kind}: {_listed(found)}" for kind, found in by_kind.items())
    if bad == "refuse":
        raise UsageError(f"{len(reasons)} bad documents: {text}. Mend them, or skip them with bad='skip'")
    warnings.warn(f"{len(reasons)} of {len(names)} documents skipped: {text}", stacklevel=2)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


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
