"""All documents of a source of text and images: how long each is, which are bad, their tokens and patches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.bad import Bad, check_bad, judge
from rrfp_jax.data.illustrated import IllustratedSource, Parts
from rrfp_jax.data.images import Image, Patches
from rrfp_jax.data.sources import BadDocument
from rrfp_jax.data.tokenizers import Tokenizer, check_vocabulary
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, printable, shown

CACHED = 64
"""Documents kept as read, since a microbatch's fields may be asked for one by one."""

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
class Laid:
    """A document of n tokens.

    Attributes:
        tokens: int64[n]; 0 where an image stands.
        patch: int64[n]: which merged patch of the document a token stands for, from 0 on, or `TEXT`. Class
            tokens are counted, but no token stands for them.
        grids: of its images.
        images: as the source gives them.
    """

    tokens: NDArray[np.int64]
    patch: NDArray[np.int64]
    grids: Grids
    images: Sequence[Image]

    @property
    def places(self) -> int:
        """Of tokens in a row; see `Lengths`."""
        return len(self.tokens) - bool(len(self.tokens) and self.patch[-1] == TEXT)

    @property
    def labels(self) -> int:
        """As in `Lengths`."""
        return int((self.patch[1:] == TEXT).sum())


@dataclass(frozen=True, kw_only=True)
class ImageCorpus:
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

    source: IllustratedSource
    tokenizer: Tokenizer
    vocabulary: int
    patches: Patches = field(default_factory=Patches)
    end: int | None = None
    bad: Bad = "refuse"
    text_alone: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_vocabulary(self.tokenizer, self.vocabulary, self.end)
        check_bad(self.bad)

    @property
    def lengths(self) -> Lengths:
        """Of every document."""
        return self._measured[0]

    @functools.cached_property
    def _measured(self) -> tuple[Lengths, list[Grids]]:
        """Lengths, and grids of images, of every document."""
        names = list(self.source.names)
        found, reasons = np.zeros((len(names), 3), np.int64), {}
        grids: list[Grids] = [()] * len(names)
        for document in range(len(names)):
            try:
                laid = self._laid(document)
                found[document], grids[document] = self._lengths(laid), laid.grids
            except BadDocument as error:
                reasons[document], *part = error.args
                names[document] += "".join(f" ({printable(name)})" for name in part if name)
        if reasons:
            judge(names, reasons, self.bad)
        if not found.any():
            raise UsageError(f"{shown(self.source)}: {len(names)} documents there, none of which can be used")
        return Lengths(*found.T), grids

    @functools.cached_property
    def fingerprint(self) -> int:
        """56 bits that change with names and lengths of documents, and with how they are read."""
        digest = hashlib.blake2b("\0".join(self.source.names).encode(errors="surrogateescape"), digest_size=7)
        for lengths in (self.lengths.patches, self.lengths.tokens, self.lengths.labels):
            digest.update(lengths.tobytes())
        digest.update(f"{self.end} {self.tokenizer.fingerprint} {self.patches}".encode())
        return int.from_bytes(digest.digest())

    def document(self, document: int) -> Laid:
        """A document as tokens; `UsageError` if it has changed since the start."""
        return self._again(document, self._cached)  # type: ignore[no-any-return]

    def pixels(self, document: int) -> NDArray[np.uint8]:
        """uint8[P, 3 * size**2]: the patches of its images, one image behind the other.

        Raises:
            UsageError: it has changed since the start, or has an image that is broken behind its header.
        """
        return self._again(document, self._pixels)  # type: ignore[no-any-return]

    def _again(self, document: int, read: Any) -> Any:
        try:
            return read(document)
        except BadDocument as error:
            remedy = (
                "leave it alone and start again" if self.patches.strict else "or give Patches(strict=True)"
            )
            raise UsageError(
                f"{self.source.names[document]}: {printable(str(error))}; the data was changed during the "
                f"run: {remedy}"
            ) from error

    def _laid(self, document: int, known: Grids | None = None) -> Laid:
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
        laid = Laid(*self._in_order(parts, known), known, images)
        if not laid.labels:
            raise BadDocument("too short")
        return laid

    def _lengths(self, laid: Laid) -> tuple[int, int, int]:
        """Patches, places, labels."""
        return sum(map(self.patches.count, laid.grids)), laid.places, laid.labels

    def _in_order(self, parts: Parts, grids: Grids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`Laid.tokens` and `Laid.patch`."""
        counts = iter([rows * columns // self.patches.merge**2 for rows, columns in grids])
        tokens, patch, merged = [], [], 0
        before = int(self.patches.class_token)
        for part in parts:
            if isinstance(part, str):
                tokens.append(_encoded(self.tokenizer, part))
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

    @functools.cached_property
    def _cached(self) -> Any:
        def read(document: int) -> Laid:
            lengths, grids = self._measured
            laid = self._laid(document, grids[document])
            known = (lengths.patches[document], lengths.tokens[document], lengths.labels[document])
            if (now := self._lengths(laid)) != known:
                raise BadDocument(f"{now} patches, tokens and labels, {known} at the start")
            return laid

        return functools.lru_cache(CACHED)(read)

    @functools.cached_property
    def _pixels(self) -> Any:
        def read(document: int) -> NDArray[np.uint8]:
            laid = self._cached(document)
            found = [np.zeros((0, self.patches.values), np.uint8)]
            for image, grid in zip(laid.images, laid.grids, strict=True):
                found.append(self.patches.patches_of(image, grid))
            return np.concatenate(found)

        return functools.lru_cache(CACHED)(read)


def _encoded(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    try:
        return np.asarray(tokenizer.encode(text), np.int64)
    except UnicodeEncodeError as error:  # half of a pair that JSON may hold
        raise BadDocument("undecodable") from error
