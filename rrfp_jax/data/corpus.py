"""All documents of a source as tokens: how long each is, which are bad, and what they hold, on demand."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.buckets import Pieces, cut
from rrfp_jax.data.images import CHANGED, BadDocument, Image, Patches
from rrfp_jax.data.sources import Parts, Raw, Source, decoded, offsets_path
from rrfp_jax.data.tokenizers import Bytes, Tokenizer
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import (
    AnyPath,
    check_fields,
    check_not_read,
    path_of,
    printable,
    says_its_arguments,
    shown,
)
from rrfp_jax.files import reserve, written_whole

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


class Lengths(NamedTuple):
    """Of documents, int64[N] each; all 0 for those that are skipped."""

    patches: NDArray[np.int64]  # of all images of a document
    tokens: NDArray[np.int64]  # places in a row; a last token that is text is only a label, and has none
    labels: NDArray[np.int64]  # tokens of text behind the first token


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
        """Whether the token behind each place is text, bool[places]."""
        if self.patch is None:
            return np.ones(max(self.places, 0), np.bool_)
        return np.append(self.patch[1:] == TEXT, False)[: self.places]

    @property
    def following(self) -> NDArray[Any]:
        """The token behind each place; 0 where there is none."""
        return np.append(self.tokens[1:], 0)[: self.places]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Patches, places and labels, as in `Lengths`."""
        return sum(self.counts), self.places, int(self.is_label.sum())


def _kept(read: Callable[[Any, int], Any]) -> Any:
    """Let a method of documents keep what it gave for the last `CACHED` of them."""
    return functools.cached_property(lambda self: functools.lru_cache(CACHED)(functools.partial(read, self)))


@says_its_arguments()
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as tokens, and with `patches` as tokens and patches of images.

    Lengths are needed before the first step. They are known from sizes if documents are bytes or tokens
    already; else every process tokenizes all text once for that (`write_tokens` saves this), and opens the
    images or, with `patches.strict=False`, their headers.

    Args:
        source: of the documents.
        tokenizer: for text, each stretch between images by itself; None if documents are tokens.
        vocabulary: of the model; a tokenizer or token beyond it is rejected.
        end: a token to put behind every document, so that its end is learnt; None for none.
        bad: "refuse" or "skip" documents that are bad: unreadable, undecodable, not what the source holds,
            with tokens below 0 or beyond the vocabulary (if read at the start), with an image that is
            missing, broken or too large, or "too short", with nothing to predict. With `patches` also those
            without an image or without text. What is skipped is counted in a warning.
        patches: how images are cut; None for text alone.
        text_alone: with `patches`, documents without an image are good.

    Raises:
        UsageError: an impossible setting, when made; bad documents or no others, when first used.
    """

    source: Source
    tokenizer: Tokenizer | None
    vocabulary: int
    end: int | None = None
    bad: Bad = "refuse"
    patches: Patches | None = None
    text_alone: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokenizer is not None and self.tokenizer.size > self.vocabulary:
            raise UsageError(
                f"{self.tokenizer} has {self.tokenizer.size} tokens, the model's vocabulary only "
                f"{self.vocabulary}: give the model at least as many, or another tokenizer"
            )
        if self.end is not None and not 0 <= self.end < self.vocabulary:
            raise UsageError(f"end={self.end}: not in the model's vocabulary of {self.vocabulary}")
        if self.bad not in ("refuse", "skip"):
            raise UsageError(f"bad={self.bad!r}: bad documents are 'refuse'd or 'skip'ped")
        if self.text_alone and self.patches is None:
            raise UsageError("text_alone=True without patches=: a corpus of text has no other documents")

    def __getstate__(self) -> dict[str, Any]:
        # Without what `_kept` keeps, which holds methods and cannot be pickled.
        return {name: own for name, own in vars(self).items() if name not in ("_again", "_cut")}

    @property
    def lengths(self) -> Lengths:
        """Of every document."""
        return self._measured[0]

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Patches and tokens of every document, int64[N, 2]."""
        return np.stack(self.lengths[:2], axis=1)

    @functools.cached_property
    def good(self) -> NDArray[np.int64]:
        """Indices of documents that are not skipped."""
        return np.flatnonzero(self.lengths.labels)

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with names and lengths of documents, and with how they are read."""
        digest = hashlib.blake2b("\0".join(self.source.names).encode(errors="surrogateescape"), digest_size=7)
        for lengths in self.lengths if self.patches else [self._tokens]:
            digest.update(lengths.tobytes())
        how = f"{self.end} {self.tokenizer and self.tokenizer.fingerprint}"
        digest.update((f"{how} {self.patches}" if self.patches else how).encode())
        return int.from_bytes(digest.digest())

    def pieces(self, documents: NDArray[np.int64], longest: tuple[int, ...]) -> Pieces:
        """These good documents; texts in pieces that are no longer than a row, those with images whole."""
        if self.patches:
            return Pieces(documents, documents[:0], self.sizes[documents])
        predictions = np.zeros_like(self.lengths.labels)
        predictions[documents] = self.lengths.labels[documents]
        return cut(predictions, *longest)

    def labels(self, pieces: Pieces) -> NDArray[np.int64]:
        """Labels of each piece, int64[P]."""
        return self.lengths.labels[pieces.document] if self.patches else pieces.size

    def piece(self, pieces: Pieces, number: int, fields: Collection[str]) -> TokenizedDocument:
        """One of the pieces, with what these fields need: masks of text are made without reading."""
        document = int(pieces.document[number])
        if self.patches:
            return self.document(document)
        begin, size = int(pieces.begin[number]), int(pieces.size[number])
        if "tokens" in fields or "labels" in fields:
            return TokenizedDocument(self.tokens(document, begin, begin + size + 1))
        return TokenizedDocument(np.zeros(size + 1, np.int64))

    def document(self, document: int) -> TokenizedDocument:
        """A whole document; `UsageError` if it has changed since the start."""
        with self._as_before(document):
            return self._again(document)  # type: ignore[no-any-return]

    def pixels(self, document: int) -> NDArray[np.uint8]:
        """uint8[P, 3 * size**2]: the patches of its images, one image behind the other.

        Raises:
            UsageError: it has changed since the start, or has an image that is broken behind its header.
        """
        with self._as_before(document):
            return self._cut(document)  # type: ignore[no-any-return]

    def tokens(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """The tokens `begin:end` of a text; no more of it is read than needed, if its sizes are known.

        Raises:
            UsageError: the document has changed since the start, or has a token beyond the vocabulary.
        """
        length = int(self._tokens[document]) - (self.end is not None)
        with self._as_before(document):
            if self._sizes is None:
                tokens: NDArray[Any] = self._again(document).tokens[begin:end]
            else:
                source: Any = self.source  # which reads parts, too, as it knows sizes
                tokens = self._encoded(source.read(document, begin, min(end, length)))
                tokens = tokens if end <= length else self._ended(tokens)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            more = "" if tokens.min() < 0 else "give the model more, or "
            raise UsageError(
                f"{self.source.names[document]}: tokens from {tokens.min()} to {tokens.max()}, but the "
                f"model's vocabulary has {self.vocabulary}; {more}tokenize anew"
            )
        return tokens

    @property
    def _tokens(self) -> NDArray[np.int64]:
        """Tokens of every text, ends included; 0 for those skipped."""
        labels = self.lengths.labels
        return labels + (labels > 0)

    @functools.cached_property
    def _sizes(self) -> NDArray[np.int64] | None:
        """Tokens of all texts, if the source tells them, so that parts can be read; -1 if unreadable."""
        plain = self.patches is None and (self.tokenizer is None or isinstance(self.tokenizer, Bytes))
        return getattr(self.source, "sizes", None) if plain else None

    @property
    def _strict(self) -> bool:
        return isinstance(self.tokenizer, Bytes) and self.tokenizer.strict

    @functools.cached_property
    def _measured(self) -> tuple[Lengths, list[Grids]]:
        """Lengths, and grids of images, of every document; raises if some are refused, or none is good."""
        names, reasons = list(self.source.names), dict[int, str]()
        lengths, grids = np.zeros((len(names), 3), np.int64), [()] * len(names)  # type: tuple[Any, list[Grids]]
        if self._sizes is not None and not self._strict:
            predictions = np.maximum(self._sizes, 0) + (self.end is not None) - 1
            lengths[:, 1:] = predictions[:, None]
            reasons = dict.fromkeys(np.flatnonzero(predictions < 1).tolist(), "too short")
            reasons |= dict.fromkeys(np.flatnonzero(self._sizes < 0).tolist(), "unreadable")
        else:
            for document in range(len(names)):
                try:
                    found = self._read(document)
                    lengths[document], grids[document] = found.lengths, found.grids
                except BadDocument as error:
                    reasons[document], *part = error.args
                    names[document] += "".join(f" ({printable(name)})" for name in part if name)
        if reasons:
            reject_or_warn(names, reasons, self.bad)
            lengths[list(reasons)] = 0
        if not lengths.any():
            raise UsageError(f"{shown(self.source)}: {len(names)} documents there, none of which can be used")
        return Lengths(*lengths.T), grids

    @contextmanager
    def _as_before(self, document: int) -> Iterator[None]:
        """Inside, a good document is read once more; `UsageError` if it is bad by now."""
        try:
            yield
        except BadDocument as error:
            why = CHANGED
            if self.patches and not self.patches.strict:
                why = "it is broken, or was changed during the run: Patches(strict=True) finds broken ones"
            raise UsageError(f"{self.source.names[document]}: {printable(str(error))}; {why}") from error

    def _encoded(self, raw: Raw) -> NDArray[Any]:
        if isinstance(raw, (np.ndarray, list, tuple)):
            if self.tokenizer is not None:
                raise UsageError(f"tokenizer={self.tokenizer}: {shown(self.source)} holds tokens; give None")
            return np.asarray(raw)
        if self.tokenizer is None:
            raise UsageError(f"tokenizer=None: {shown(self.source)} holds text; give one, such as Bytes()")
        if isinstance(raw, bytes) and isinstance(self.tokenizer, Bytes):
            return np.frombuffer(raw, np.uint8)
        try:
            return np.asarray(self.tokenizer.encode(decoded(raw) if isinstance(raw, bytes) else raw))
        except UnicodeEncodeError as error:  # half of a pair, which JSON may hold
            raise BadDocument("undecodable") from error

    def _ended(self, tokens: NDArray[Any]) -> NDArray[Any]:
        return tokens if self.end is None else np.append(tokens, self.end)

    def _read(self, document: int, known: Grids | None = None) -> TokenizedDocument:
        """A document, read and tokenized; its images are opened unless their grids are known."""
        raw = self.source.read(document)
        if self.patches:
            plain = decoded(raw) if isinstance(raw, bytes) else raw
            parts = plain if isinstance(plain, (list, tuple)) else [plain]
            found = self._of_parts(document, parts, self.patches, known)
        elif isinstance(raw, (list, tuple)) and not all(isinstance(part, Integral) for part in raw):
            raise UsageError(f"patches=None: {shown(self.source)} holds images; give Patches()")
        else:
            strict = self._strict and isinstance(raw, bytes)
            found = TokenizedDocument(self._ended(self._encoded(decoded(raw) if strict else raw)))
        if found.lengths[2] < 1:
            raise BadDocument("too short")
        if found.tokens.min() < 0:
            raise BadDocument("with negative tokens")
        if found.tokens.max() >= self.vocabulary:
            remedy = "give the model more, or tokenize anew"
            raise BadDocument(f"with tokens beyond the vocabulary of {self.vocabulary} ({remedy})")
        return found

    def _of_parts(self, document: int, parts: Parts, cut: Patches, known: Grids | None) -> TokenizedDocument:
        images = [part for part in parts if not isinstance(part, str)]
        if not images and not self.text_alone:
            raise BadDocument("without an image")
        if not any(isinstance(part, str) and part.strip() for part in parts):
            raise BadDocument("without text")
        if known is None:
            known = tuple(cut.grid_of(image) for image in images)
        elif len(known) != len(images):
            raise BadDocument(f"{len(images)} images, {len(known)} at the start")
        counts = iter([rows * columns // cut.merge**2 for rows, columns in known])
        tokens, patch, merged = [], [], 0
        for part in parts:
            if isinstance(part, str):
                tokens.append(np.asarray(self._encoded(part), np.int64))
                patch.append(np.full(len(tokens[-1]), TEXT))
            else:
                merged, count = merged + int(cut.class_token), next(counts)
                tokens.append(np.zeros(count, np.int64))
                patch.append(merged + np.arange(count))
                merged += count
        every, kinds = self._ended(np.concatenate(tokens)), np.concatenate(patch)
        kinds = np.append(kinds, np.full(len(every) - len(kinds), TEXT))
        return TokenizedDocument(every, kinds, cut, known, images, functools.partial(self.pixels, document))

    @_kept
    def _again(self, document: int) -> TokenizedDocument:
        lengths, grids = self._measured
        found = self._read(document, grids[document])
        known = tuple(int(each[document]) for each in lengths)
        if found.lengths != known and self.patches is None:
            more = 1 - (self.end is not None)
            raise BadDocument(f"{found.places + more} tokens, {known[1] + more} at the start")
        if found.lengths != known:
            raise BadDocument(f"{found.lengths} patches, tokens and labels, {known} at the start")
        return found

    @_kept
    def _cut(self, document: int) -> NDArray[np.uint8]:
        found = self._again(document)
        cut = [found.cut.patches_of(*own) for own in zip(found.images, found.grids, strict=True)]
        return np.concatenate([np.zeros((0, found.cut.values), np.uint8), *cut])


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


def write_tokens(corpus: Corpus, path: AnyPath) -> None:
    """Tokenize once for all runs: the corpus's good documents as the files that a `TokenFile` reads.

    Args:
        corpus: whose `end` is written, too.
        path: a `.npy`; `.offsets.npy` is written next to it.

    Raises:
        UsageError: another suffix, which `TokenFile` would take for raw numbers; a file that cannot be
            written, or that the corpus reads; and what `Corpus` rejects. Earlier files are as they were.
    """
    path = path_of("path", path)
    if path.suffix != ".npy":
        raise UsageError(f"path={path}: tokens are written as an array; give a name that ends in .npy")
    if corpus.patches:
        raise UsageError("corpus: documents with images are not tokens alone, and cannot be written as such")
    kept = corpus.good
    offsets = np.concatenate([[0], np.cumsum(corpus.lengths.labels[kept] + 1)])
    dtype = np.uint16 if corpus.vocabulary <= 2**16 else np.int32
    for output in (path, offsets_path(path)):
        check_not_read("path", output, getattr(corpus.source, "files", ()))
    try:
        with written_whole(path) as part, written_whole(offsets_path(path)) as beside:
            tokens = np.lib.format.open_memmap(part, "w+", dtype, (int(offsets[-1]),))  # type: ignore[no-untyped-call]
            reserve(part)
            for document, begin, end in zip(kept.tolist(), offsets, offsets[1:], strict=False):
                tokens[begin:end] = corpus.tokens(document, 0, int(end - begin))
            tokens.flush()
            with beside.open("wb") as file:
                np.save(file, offsets)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
